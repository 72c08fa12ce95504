"""Freezing, updating and reloading on a GPU, all seen through the driver.

The same bodies run on a host device without the marker `gpu`, so that they are seen working where there is no GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from gpu.eyes import driver_free_bytes
from gpu.protocol_rig import ON_EACH, PROMPTS, cache, pool_bytes, slack_bytes
from support.engine_host import dummy_spec, write_config
from support.engine_rank import EngineRank, engine_rank

from torpor.actors.config import (
    RankSpec,
)
from torpor.actors.engine.protocol import TensorSpec
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    Kind,
    OnDiscard,
)
from torpor.native import Device

TOKENS = 64
GONE = {"weights": "none", "kv_cache": "pinned"}


def spec_of(folder: Path, kind: str, seed: int = 0) -> RankSpec:
    return dummy_spec(write_config(folder), kv=cache(kind), dtype="float32", step_tokens=16, seed=seed)


@asynccontextmanager
async def rank_on(kind: str, spec: RankSpec, **parts: object) -> AsyncIterator[EngineRank]:
    if kind == "cuda":
        parts["make_device"] = lambda spec: Device.cuda(0)
    async with engine_rank(spec, **parts) as rank:
        assert rank.device.kind == kind
        yield rank


def free_bytes(rank: EngineRank) -> int:
    """As the driver has it, without what torch keeps for itself."""
    if rank.device.kind != "cuda":
        return rank.free_bytes()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return driver_free_bytes()


async def ask_all(rank: EngineRank) -> None:
    for number, prompt in enumerate(PROMPTS):
        await rank.ask(f"r{number}", prompt, max_tokens=TOKENS)


async def all_said(rank: EngineRank) -> list[list[int]]:
    names = [f"r{number}" for number in range(len(PROMPTS))]
    await rank.ended(*names)
    return [rank.tokens(name) for name in names]


async def say(rank: EngineRank, name: str) -> list[int]:
    await rank.ask(name, PROMPTS[9], max_tokens=16)
    await rank.ended(name)
    return rank.tokens(name)


def parameters(rank: EngineRank) -> dict[str, torch.Tensor]:
    assert rank.engine._model is not None
    return dict(rank.engine._model.module.named_parameters())


def copies(rank: EngineRank) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in parameters(rank).items()}


def assert_holds(rank: EngineRank, wanted: Mapping[str, torch.Tensor]) -> None:
    for name, value in parameters(rank).items():
        assert torch.equal(value.cpu(), wanted[name]), name


def assert_freed(kind: str, rank: EngineRank, before: int, freed: int) -> None:
    gained = free_bytes(rank) - before
    assert freed >= pool_bytes(kind) and abs(gained - freed) <= slack_bytes(kind), (gained, freed)


@ON_EACH
@pytest.mark.parametrize("mode", ["pinned", "none"])
def test_sixteen_generations_frozen_over_a_sleep_end_token_for_token_g2_m1(
    tmp_path: Path, kind: str, mode: str
) -> None:
    """In float32: with the cache kept they go on, with it discarded they are recomputed."""

    async def story() -> None:
        async with rank_on(kind, spec_of(tmp_path, kind)) as rank:
            await ask_all(rank)
            never_slept = await all_said(rank)
        async with rank_on(kind, spec_of(tmp_path, kind)) as rank:
            await ask_all(rank)
            await rank.until(lambda: len(rank.tokens("r3")) >= 2)
            before = free_bytes(rank)
            reply = await rank.sleep(restore={"kv_cache": mode}, drain=DrainSpec(DrainMode.FREEZE))
            assert_freed(kind, rank, before, reply.freed_bytes)
            assert (await rank.core.status()).frozen_requests > 0
            await rank.wake()
            assert await all_said(rank) == never_slept
            assert abs(free_bytes(rank) - before) <= slack_bytes(kind)

    asyncio.run(story())


@dataclass(frozen=True)
class Handed:
    """Tensors of another process, as the rank sees them."""

    tensors: Mapping[str, torch.Tensor]

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(tuple(value.shape), "float32") for name, value in self.tensors.items()}

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@ON_EACH
def test_tensors_that_are_handed_over_are_written_where_the_weights_lie_c10_s1(
    tmp_path: Path, kind: str
) -> None:
    """Also while the KV cache sleeps, and kept through the next sleep."""

    async def story() -> None:
        async with rank_on(kind, spec_of(tmp_path, kind, seed=7)) as rank:
            new, expected = copies(rank), await say(rank, "loaded with them")
        async with rank_on(kind, spec_of(tmp_path, kind), open_handed=lambda name: Handed(new)) as rank:
            assert await say(rank, "old") != expected
            places = {name: value.data_ptr() for name, value in parameters(rank).items()}
            await rank.sleep("kv_cache", restore={"kv_cache": "none"})
            before = free_bytes(rank)
            await rank.operate(Kind.UPDATE, "weights", weights_handed="a trainer's")
            assert abs(free_bytes(rank) - before) <= slack_bytes(kind), "it takes no memory of the device"
            await rank.wake("kv_cache")
            assert {name: value.data_ptr() for name, value in parameters(rank).items()} == places
            assert_holds(rank, new)
            assert await say(rank, "new") == expected
            await rank.sleep(restore={"weights": "pinned", "kv_cache": "none"})
            await rank.wake()
            assert_holds(rank, new)
            assert await say(rank, "later") == expected

    asyncio.run(story())


@ON_EACH
@pytest.mark.parametrize("mode", ["none", "memset"])
def test_discarded_weights_are_read_again_byte_for_byte_c9_k3(tmp_path: Path, kind: str, mode: str) -> None:
    """With the memory really gone meanwhile, also of a reload that is stopped, and the kept prefixes usable."""

    async def story() -> None:
        async with rank_on(kind, spec_of(tmp_path, kind)) as rank:
            old, said = copies(rank), await say(rank, "before")
            before = free_bytes(rank)
            reply = await rank.sleep(restore=GONE | {"weights": mode})
            assert_freed(kind, rank, before, reply.freed_bytes)
            asleep, reload = free_bytes(rank), rank.engine.reload_weights

            def stopped(go_on: object) -> str:
                raise TimeoutError("out of time")

            rank.engine.reload_weights = stopped  # type: ignore[method-assign]
            with pytest.raises(AssertionError, match="out of time"):
                await rank.wake(on_discard=OnDiscard.RELOAD)
            operation = (await rank.core.status()).gate_operation
            assert operation is not None
            await rank.abort(operation)
            assert abs(free_bytes(rank) - asleep) <= slack_bytes(kind)
            rank.engine.reload_weights = reload  # type: ignore[method-assign]
            await rank.wake(on_discard=OnDiscard.RELOAD)
            assert_holds(rank, old)
            assert abs(free_bytes(rank) - before) <= slack_bytes(kind)
            assert await say(rank, "after") == said
            assert rank.last("after").cached_tokens > 0

    asyncio.run(story())
