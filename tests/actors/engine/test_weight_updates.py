"""Other weights in a rank that runs: what it says afterwards, through sleeps, and what is refused before any write."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import write_gguf, write_tensors
from support.engine_host import Oracle, dummy_spec, write_config
from support.engine_rank import EngineRank, engine_rank

from torpor.actors.config import RankSpec
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    GateReason,
    Kind,
    LedgerPhase,
    OperationRequest,
    Phase,
    PhaseCall,
    PhaseReply,
    RejectCode,
    RestoreMode,
)

PROMPT = [random.Random(f"update {i}").randrange(256) for i in range(40)]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def new(tiny: Path) -> Oracle:
    """The model with other weights."""
    return Oracle(tiny, seed=7)


@pytest.fixture(scope="module")
def checkpoint(new: Oracle, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A safetensors folder with them, under a root of its own."""
    folder = tmp_path_factory.mktemp("roots") / "new"
    tensors = {name: tensor.clone() for name, tensor in new.model.named_parameters()}
    return write_tensors(folder, tensors, tiny)


@pytest.fixture
def spec(tiny: Path, checkpoint: Path) -> RankSpec:
    return replace(dummy_spec(tiny, step_tokens=16), weights_roots=(str(checkpoint.parent),))


async def say(rank: EngineRank, name: str, count: int = 12) -> list[int]:
    await rank.ask(name, PROMPT, max_tokens=count)
    await rank.ended(name)
    return rank.tokens(name)


def parameters(rank: EngineRank) -> Tensors:
    assert rank.engine._model is not None
    return dict(rank.engine._model.module.named_parameters())


async def preflight(rank: EngineRank, path: object) -> PhaseReply:
    request = OperationRequest(Kind.UPDATE, "tiny", ("weights",), weights_path=str(path))
    return await rank.core.preflight(PhaseCall(f"look at {path}", Phase.PREFLIGHT, 1), request)


async def test_new_weights_say_what_a_model_loaded_with_them_says_also_after_a_sleep_that_keeps_them(
    spec: RankSpec, oracle: Oracle, new: Oracle, checkpoint: Path
) -> None:
    """C10, M9, S1: the backup of the old ones, made by the first sleep, is used no more."""
    async with engine_rank(replace(spec, host_pool_bytes=8 << 20)) as rank:
        assert await say(rank, "old") == oracle.greedy(PROMPT, 12)
        await rank.sleep("weights", restore={"weights": "pinned"})
        await rank.wake("weights")
        place = {name: tensor.data_ptr() for name, tensor in parameters(rank).items()}
        reply = await rank.update(checkpoint)
        assert reply.prefix_tokens_lost >= 40
        assert (await rank.core.status()).prefix_tokens == 0
        assert {name: tensor.data_ptr() for name, tensor in parameters(rank).items()} == place
        expected = new.greedy(PROMPT, 12)
        assert expected != oracle.greedy(PROMPT, 12)
        assert await say(rank, "new") == expected
        assert rank.last("new").cached_tokens == 0
        await rank.sleep("weights", restore={"weights": "pinned"})
        await rank.wake("weights")
        assert await say(rank, "later") == expected
        status = await rank.core.status()
        assert (status.weights_version, status.gate_open, status.kind) == (1, True, Kind.WAKE)


async def test_a_backup_made_ahead_is_of_the_weights_that_are_there_and_an_update_wants_another_m9(
    spec: RankSpec, oracle: Oracle, new: Oracle, checkpoint: Path
) -> None:
    async def prefill() -> int:
        return await rank.core.prefill(8 << 20, 60.0, backups=True, pool=False)

    async with engine_rank(replace(spec, host_pool_bytes=8 << 20)) as rank:
        made_bytes = await prefill()
        assert (made_bytes > 0, await prefill()) == (True, 0)
        assert (await rank.sleep("weights")).kept_bytes == 0
        await rank.wake("weights")
        assert await say(rank, "old") == oracle.greedy(PROMPT, 12)
        await rank.update(checkpoint)
        assert await prefill() == made_bytes
        assert (await rank.sleep("weights")).kept_bytes == 0
        assert await prefill() == 0, "asleep"
        await rank.wake("weights")
        assert await say(rank, "new") == new.greedy(PROMPT, 12)


@pytest.mark.parametrize("mode", ["none", "disk"])
async def test_weights_that_do_not_sleep_in_host_memory_get_no_backup_there(
    spec: RankSpec, mode: str
) -> None:
    model = replace(spec.model, restore_modes={**spec.model.restore_modes, "weights": RestoreMode(mode)})
    async with engine_rank(replace(spec, model=model, host_pool_bytes=8 << 20)) as rank:
        assert await rank.core.prefill(8 << 20, 60.0, backups=True, pool=True) == 0
        assert all(
            row["host_bytes"] == 0 for row in (await rank.core.status()).memory if row["tag"] == "weights"
        )


async def test_a_gguf_file_updates_a_model_too(spec: RankSpec, new: Oracle, checkpoint: Path) -> None:
    path = write_gguf(checkpoint.parent / "new.gguf", new.model)
    async with engine_rank(spec) as rank:
        await rank.update(path)
        assert await say(rank, "new") == new.greedy(PROMPT, 12)
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(AssertionError, match="cannot be read"):
            await rank.update(path)


@pytest.mark.parametrize("mode", ["none", "pinned"])
async def test_an_update_works_with_the_kv_cache_asleep_and_forgets_what_it_kept(
    spec: RankSpec, new: Oracle, checkpoint: Path, mode: str
) -> None:
    """C10, K1: prefixes go on every tier."""
    async with engine_rank(spec) as rank:
        await say(rank, "old")
        await rank.sleep("kv_cache", restore={"kv_cache": mode})
        free_bytes = rank.free_bytes()
        await rank.update(checkpoint)
        status = await rank.core.status()
        assert (status.gate_reason, status.parked_tags) == (GateReason.ASLEEP, ("kv_cache",))
        assert (rank.free_bytes(), status.weights_version) == (free_bytes, 1)
        await rank.wake("kv_cache")
        assert await say(rank, "new") == new.greedy(PROMPT, 12)
        assert rank.last("new").cached_tokens == 0


@pytest.mark.parametrize("kv", [True, False])
async def test_weights_that_woke_without_contents_serve_again_once_they_are_updated(
    spec: RankSpec, new: Oracle, checkpoint: Path, kv: bool
) -> None:
    """C9, C3, F27: as a trainer does it, with the KV cache asleep until the end or not."""
    async with engine_rank(spec) as rank:
        await rank.sleep("weights", "kv_cache", restore={"weights": "none", "kv_cache": "none"})
        refused = await preflight(rank, checkpoint)
        assert [one.code for one in refused.refusals] == [RejectCode.WRONG_STATE]
        assert "wake" in refused.refusals[0].reason
        await rank.wake("weights")
        if kv:
            await rank.wake("kv_cache")
            assert (await rank.core.status()).gate_reason is GateReason.CONTENTS_UNDEFINED
        await rank.update(checkpoint)
        if not kv:
            assert (await rank.core.status()).gate_reason is GateReason.ASLEEP
            await rank.wake("kv_cache")
        status = await rank.core.status()
        assert (status.gate_open, status.undefined_tags) == (True, ())
        assert await say(rank, "new") == new.greedy(PROMPT, 12)


async def test_a_frozen_generation_goes_on_as_the_new_weights_would_from_its_tokens_so_far(
    spec: RankSpec, oracle: Oracle, new: Oracle, checkpoint: Path
) -> None:
    """C10, G2: what the old weights computed is not mixed in."""
    async with engine_rank(spec) as rank:
        await rank.ask("r", PROMPT, max_tokens=60)
        await rank.until(lambda: len(rank.tokens("r")) >= 3)
        operation = await rank.stage(
            Kind.UPDATE, ["weights"], drain=DrainSpec(DrainMode.FREEZE), weights_path=str(checkpoint)
        )
        await asyncio.sleep(0.05)  # for what was said to be heard
        said = list(rank.tokens("r"))
        assert said == oracle.greedy(PROMPT, len(said)) and len(said) < 60
        assert (await rank.core.status()).frozen_requests == 1
        for call in (rank.core.commit, rank.core.publish):
            phase = Phase.COMMIT if call == rank.core.commit else Phase.PUBLISH
            assert (await call(PhaseCall(operation, phase, 1))).ok
        await rank.ended("r")
        assert rank.tokens("r") == said + new.greedy(PROMPT + said, 60 - len(said))


async def test_an_update_that_is_aborted_leaves_the_old_weights_and_prefixes(
    spec: RankSpec, oracle: Oracle, checkpoint: Path
) -> None:
    async with engine_rank(spec) as rank:
        await say(rank, "old")
        operation = await rank.stage(Kind.UPDATE, ["weights"], weights_path=str(checkpoint))
        status = await rank.core.status()
        assert (status.ledger_phase, status.operation, status.kind) == (
            LedgerPhase.STAGED,
            operation,
            Kind.UPDATE,
        )
        assert (status.gate_open, status.staged_digest != "") == (False, True)
        sleep = OperationRequest(Kind.SLEEP, "tiny")
        other = await rank.core.preflight(PhaseCall("another", Phase.PREFLIGHT, 1), sleep)
        assert [one.code for one in other.refusals] == [RejectCode.CONFLICT]
        await rank.abort(operation)
        status = await rank.core.status()
        assert (status.gate_open, status.ledger_phase, status.weights_version) == (True, LedgerPhase.IDLE, 0)
        assert await say(rank, "again") == oracle.greedy(PROMPT, 12)
        assert rank.last("again").cached_tokens > 0


def renamed(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.up.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")


def extra(tensors: Tensors) -> None:
    tensors["model.layers.9.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].clone()


def reshaped(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(47)


def integers(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int32)


def untied(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (renamed, "missing, the first 'model.layers.0.mlp.up_proj.weight'"),
        (extra, "no tensor 'model.layers.9.mlp.up_proj.weight'"),
        (reshaped, r"'model.norm.weight' has the shape \[47\], the model's is \[48\]"),
        (integers, "'model.norm.weight' has the dtype I32"),
        (untied, "one tensor here, and differ"),
    ],
)
async def test_weights_that_do_not_fit_are_refused_by_name_before_anything_is_written(
    spec: RankSpec, oracle: Oracle, checkpoint: Path, spoil: Callable[[Tensors], None], says: str
) -> None:
    """C10."""
    tensors = load_file(checkpoint / "model.safetensors")
    spoil(tensors)
    folder = write_tensors(checkpoint.parent / f"bad {spoil.__name__}", tensors, checkpoint / "config.json")
    async with engine_rank(spec) as rank:
        before = {name: tensor.clone() for name, tensor in parameters(rank).items()}
        with pytest.raises(AssertionError, match=says) as refused:
            await rank.update(folder)
        assert RejectCode.WEIGHTS_REFUSED.value in str(refused.value)
        for name, tensor in parameters(rank).items():
            assert torch.equal(tensor, before[name]), name


async def test_nothing_outside_of_the_roots_is_read_whatever_links_say(
    spec: RankSpec, tiny: Path, checkpoint: Path, tmp_path: Path
) -> None:
    roots = checkpoint.parent
    outside = write_tensors(tmp_path / "outside", load_file(checkpoint / "model.safetensors"), tiny)
    (roots / "link").symlink_to(outside)
    (roots / "files").mkdir()
    (roots / "files" / "config.json").symlink_to(outside / "config.json")
    (roots / "files" / "model.safetensors").symlink_to(outside / "model.safetensors")
    (roots / "inner").symlink_to(checkpoint)
    tries = {
        outside: "outside of weights_roots",
        roots / "link": "outside of weights_roots",
        roots / "files": "outside of weights_roots",
        roots / "new" / ".." / ".." / "etc": "outside of weights_roots",
        Path("/nobody/is/told/what/is/here"): "outside of weights_roots",
        Path("new"): "not an absolute path",
        roots / "none": "nothing at",
    }
    async with engine_rank(spec) as rank:
        for path, says in tries.items():
            (refusal,) = (await preflight(rank, path)).refusals
            assert refusal.code is RejectCode.WEIGHTS_REFUSED and says in refusal.reason, path
        assert (await preflight(rank, roots / "inner")).ok
    async with engine_rank(replace(spec, weights_roots=())) as rank:
        (refusal,) = (await preflight(rank, checkpoint)).refusals
        assert "no weights_roots are configured" in refusal.reason


async def test_weights_of_a_model_that_computes_otherwise_are_refused(
    spec: RankSpec, checkpoint: Path
) -> None:
    """All shapes fit."""
    folder = write_tensors(
        checkpoint.parent / "other", load_file(checkpoint / "model.safetensors"), checkpoint / "config.json"
    )
    write_config(folder, rms_norm_eps=0.5)
    async with engine_rank(spec) as rank:
        (refusal,) = (await preflight(rank, folder)).refusals
        assert "rms_norm_eps 0.5" in refusal.reason


async def test_a_write_that_fails_in_the_middle_can_only_go_forward(
    spec: RankSpec, new: Oracle, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C10: no abort after the first write; and a commit that is asked for again ends what it began."""
    async with engine_rank(spec) as rank:
        operation = await rank.stage(Kind.UPDATE, ["weights"], weights_path=str(checkpoint))
        write_one, left = rank.engine._write_one, [3]

        def fails(parameter: torch.Tensor, value: torch.Tensor) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("the device does not take it")
            write_one(parameter, value)

        monkeypatch.setattr(rank.engine, "_write_one", fails)
        reply = await rank.core.commit(PhaseCall(operation, Phase.COMMIT, 1))
        assert not reply.ok and reply.refusals[0].code is RejectCode.RANK_FAILED
        status = await rank.core.status()
        assert (status.ledger_phase, status.operation) == (LedgerPhase.COMMITTING, operation)
        assert (status.gate_open, status.weights_version) == (False, 0)
        aborted = await rank.core.abort(PhaseCall(operation, Phase.STAGE, 1))
        assert not aborted.ok and "only go forward" in aborted.refusals[0].reason
        assert (await rank.core.commit(PhaseCall(operation, Phase.COMMIT, 1))).ok
        assert (await rank.core.publish(PhaseCall(operation, Phase.PUBLISH, 1))).ok
        assert await say(rank, "new") == new.greedy(PROMPT, 12)
        assert (await rank.core.status()).weights_version == 1
