"""Weights that slept without contents and are read again from their source: the same bytes, logits and prefixes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import write_checkpoint, write_gguf, write_tensors, write_tokenizer
from support.engine_host import Oracle, dummy_spec, write_config
from support.engine_rank import EngineRank, engine_rank

from torpor.actors.config import EngineConfig, RankSpec
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    GateReason,
    Kind,
    OnDiscard,
    OperationRequest,
    Phase,
    PhaseCall,
    PhaseReply,
    RejectCode,
)

PROMPT = [random.Random(f"reload {i}").randrange(256) for i in range(40)]
RELOAD = {"on_discard": OnDiscard.RELOAD}
STALE = RELOAD | {"accept_stale_weights": True}
GONE = {"weights": "none", "kv_cache": "pinned"}


def dummy(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(write_config(folder)), load_format="dummy", seed=3)


def safetensors(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(write_checkpoint(folder, Oracle(write_config(folder), seed=3))))


def safetensors_of_half(folder: Path) -> EngineConfig:
    """Another dtype than the model's, as loading converts it."""
    config = write_config(folder)
    tensors = {n: t.detach().to(torch.bfloat16) for n, t in Oracle(config, seed=3).model.named_parameters()}
    write_tokenizer(folder)
    return EngineConfig(model=str(write_tensors(folder, tensors, config)))


def safetensors_with_more(folder: Path) -> EngineConfig:
    """A tied head that is stored too, and otherwise, and a buffer: loading passes them over, an update would not."""
    config = write_config(folder)
    tensors = {n: t.detach().clone() for n, t in Oracle(config, seed=3).model.named_parameters()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    write_tokenizer(folder)
    return EngineConfig(model=str(write_tensors(folder, tensors, config)))


def gguf(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(write_gguf(folder / "model.gguf", Oracle(write_config(folder), seed=3).model))
    )


SOURCES = (dummy, safetensors, safetensors_of_half, safetensors_with_more, gguf)


def spec_of(engine: EngineConfig, folder: Path) -> RankSpec:
    spec = dummy_spec(folder)
    return replace(spec, model=replace(spec.model, engine=replace(engine, step_tokens=16)))


async def say(rank: EngineRank, name: str, count: int = 12) -> list[int]:
    await rank.ask(name, PROMPT, max_tokens=count)
    await rank.ended(name)
    return rank.tokens(name)


def parameters(rank: EngineRank) -> dict[str, torch.Tensor]:
    assert rank.engine._model is not None
    return dict(rank.engine._model.module.named_parameters())


async def preflight(rank: EngineRank, name: str, **fields: object) -> PhaseReply:
    request = OperationRequest(Kind.WAKE, "tiny", **fields)  # type: ignore[arg-type]
    return await rank.core.preflight(PhaseCall(name, Phase.PREFLIGHT, 1), request)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("mode", ["none", "memset"])
async def test_a_wake_brings_the_same_bytes_and_answers_from_each_source_and_keeps_the_prefixes(
    tmp_path: Path, source: Callable[[Path], EngineConfig], mode: str
) -> None:
    """C9, S1, K3: K and V that were kept are those of the same weights."""
    async with engine_rank(spec_of(source(tmp_path), tmp_path)) as rank:
        said = await say(rank, "before")
        bytes_before = {name: value.clone() for name, value in parameters(rank).items()}
        places = {name: value.data_ptr() for name, value in parameters(rank).items()}
        free_bytes = rank.free_bytes()
        await rank.sleep(restore=GONE | {"weights": mode})
        assert rank.free_bytes() > free_bytes
        reply = await rank.wake(**RELOAD)
        assert (rank.free_bytes(), reply.ok) == (free_bytes, True)
        for name, value in parameters(rank).items():
            assert torch.equal(value, bytes_before[name]), name
            assert value.data_ptr() == places[name]
        assert await say(rank, "after") == said
        assert rank.last("after").cached_tokens == 32
        status = await rank.core.status()
        assert (status.gate_open, status.undefined_tags, status.weights_version) == (True, (), 0)


async def test_the_plan_of_a_wake_counts_what_it_reads_and_a_wake_that_waits_reads_nothing(
    tmp_path: Path,
) -> None:
    """C8, C9, F27: the deadline follows the bytes."""
    async with engine_rank(spec_of(safetensors(tmp_path), tmp_path)) as rank:
        size_bytes = sum(value.nbytes for value in parameters(rank).values())
        largest = max(value.nbytes for value in parameters(rank).values())
        await rank.sleep(restore=GONE)
        reading = await preflight(rank, "reading", **RELOAD)
        waiting = await preflight(rank, "waiting", on_discard=OnDiscard.WAIT)
        nothing = await preflight(rank, "nothing", tags=("kv_cache",), **RELOAD)
        told = [(reply.reload_bytes, reply.host_bytes) for reply in (reading, waiting, nothing)]
        assert told == [(size_bytes, largest), (0, 0), (0, 0)]
        assert reading.digest != waiting.digest, "ranks that differ in this are found (M7)"
        await rank.wake(on_discard=OnDiscard.WAIT)
        status = await rank.core.status()
        assert (status.gate_reason, status.undefined_tags) == (GateReason.CONTENTS_UNDEFINED, ("weights",))


async def test_weights_alone_are_read_before_the_kv_cache_wakes_and_undefined_ones_where_they_lie(
    tmp_path: Path,
) -> None:
    """C3, C9: also rubbish that was kept, of which no backup may come back later (M9)."""
    async with engine_rank(replace(spec_of(gguf(tmp_path), tmp_path), host_pool_bytes=8 << 20)) as rank:
        said = await say(rank, "before")
        await rank.sleep(restore=GONE)
        await rank.wake("weights", **RELOAD)
        assert (await rank.core.status()).undefined_tags == ()
        await rank.wake("kv_cache", **RELOAD)
        assert await say(rank, "once") == said
        await rank.sleep("weights", restore={"weights": "memset"})
        await rank.wake(on_discard=OnDiscard.WAIT)
        await rank.wake(**RELOAD)
        assert await say(rank, "awake") == said
        await rank.sleep("weights", restore={"weights": "memset"})
        await rank.wake(on_discard=OnDiscard.WAIT)
        await rank.sleep("weights", restore={"weights": "pinned"})
        await rank.wake(**RELOAD)
        assert await say(rank, "kept rubbish") == said
        await rank.sleep("weights", restore={"weights": "pinned"})
        await rank.wake(**RELOAD)
        assert await say(rank, "no backup of it") == said


async def test_pushed_weights_are_not_replaced_by_the_source_s_unless_that_is_accepted(
    tmp_path: Path,
) -> None:
    """C9: no version is told whose bytes are not there; what the lost ones computed goes with them."""
    (tmp_path / "new").mkdir()
    checkpoint = safetensors(tmp_path)
    new = write_checkpoint(tmp_path / "new", Oracle(write_config(tmp_path / "new"), seed=7))
    spec = replace(spec_of(checkpoint, tmp_path), weights_roots=(str(new),))
    async with engine_rank(spec) as rank:
        old = await say(rank, "old")
        await rank.update(new)
        pushed = await say(rank, "pushed")
        assert pushed != old
        await rank.sleep(restore=GONE)
        await rank.wake(**RELOAD)
        status = await rank.core.status()
        assert (status.undefined_tags, status.weights_version) == (("weights",), 1)
        await rank.update(new)
        assert await say(rank, "pushed again") == pushed
        await rank.ask("frozen", PROMPT, max_tokens=60)
        await rank.until(lambda: len(rank.tokens("frozen")) >= 3)
        await rank.sleep(restore=GONE, drain=DrainSpec(DrainMode.FREEZE))
        await asyncio.sleep(0.05)
        so_far = list(rank.tokens("frozen"))
        await rank.wake(**RELOAD)
        assert (await rank.core.status()).gate_reason is GateReason.CONTENTS_UNDEFINED
        await rank.wake(**STALE)
        status = await rank.core.status()
        assert (status.gate_open, status.undefined_tags, status.weights_version) == (True, (), 0)
        await rank.ended("frozen")
        expected = Oracle(tmp_path / "config.json", seed=3).greedy(PROMPT + so_far, 60 - len(so_far))
        assert rank.tokens("frozen") == so_far + expected
        assert await say(rank, "old again") == old


@pytest.mark.parametrize("source", [dummy, safetensors, gguf])
async def test_a_source_that_has_changed_or_gone_is_refused_and_the_rank_sleeps_on(
    tmp_path: Path, source: Callable[[Path], EngineConfig]
) -> None:
    """C9: other bytes under the same version would be a lie."""
    engine = source(tmp_path)
    file = tmp_path / "model.safetensors" if source is safetensors else Path(engine.model)
    async with engine_rank(spec_of(engine, tmp_path)) as rank:
        said = await say(rank, "before")
        await rank.sleep(restore=GONE)
        free_bytes, contents = rank.free_bytes(), file.read_bytes()
        file.unlink()
        refused = await preflight(rank, "gone", **RELOAD)
        assert [one.code for one in refused.refusals] == [RejectCode.WEIGHTS_REFUSED]
        assert "on_discard wait" in refused.refusals[0].reason
        file.write_bytes(contents)
        os.utime(file, ns=(0, 0))
        refused = await preflight(rank, "changed", **RELOAD)
        assert "has changed since" in refused.refusals[0].reason
        assert (rank.free_bytes(), (await rank.core.status()).gate_reason) == (free_bytes, GateReason.ASLEEP)
        await rank.wake(**STALE)
        assert await say(rank, "accepted") == said
        assert rank.last("accepted").cached_tokens == 0, "nobody can know that they are the same"


@pytest.mark.parametrize("source", [dummy, safetensors, gguf])
async def test_a_reload_can_be_stopped_at_each_of_its_pieces_and_a_retry_works(
    tmp_path: Path, source: Callable[[Path], EngineConfig]
) -> None:
    """M3, C6: the k-th look at whether to go on; the memory is parked again, and free."""
    async with engine_rank(spec_of(source(tmp_path), tmp_path)) as rank:
        said, looks = await say(rank, "before"), [0]
        await rank.sleep(restore=GONE)
        free_bytes = rank.free_bytes()
        reload = rank.engine.reload_weights
        for stop_at in (1, 2, 5, 30):
            looks[0] = 0

            def stopping(go_on: Callable[[], None], stop_at: int = stop_at) -> str:
                def look() -> None:
                    go_on()
                    looks[0] += 1
                    if looks[0] == stop_at:
                        raise TimeoutError("out of time")

                return reload(look)

            rank.engine.reload_weights = stopping  # type: ignore[method-assign]
            with pytest.raises(AssertionError, match="out of time"):
                await rank.wake(**RELOAD)
            assert looks[0] == stop_at
            operation = (await rank.core.status()).gate_operation
            assert operation is not None
            await rank.abort(operation)
            status = await rank.core.status()
            assert (status.parked_tags, status.gate_reason) == (("kv_cache", "weights"), GateReason.ASLEEP)
            assert rank.free_bytes() == free_bytes
        rank.engine.reload_weights = reload  # type: ignore[method-assign]
        await rank.wake(**RELOAD)
        assert await say(rank, "after") == said
        assert rank.last("after").cached_tokens == 32
