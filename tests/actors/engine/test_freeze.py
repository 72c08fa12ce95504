"""Running generations frozen over a sleep: whatever became of the cache, they end token for token as without it."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.engine_host import EngineHost, KvCacheConfig, dummy_spec
from support.engine_rank import EngineRank, engine_rank

from torpor.actors.config import MIB
from torpor.actors.messages import DrainMode, DrainSpec, FinishReason, GateReason, Kind
from torpor.native import Device

FREEZE = DrainSpec(DrainMode.FREEZE)
GENERATIONS = 16
TOKENS = 64
MODES = ("none", "memset", "cpu", "pinned")


@dataclass(frozen=True)
class Asked:
    """One generation; every second one samples."""

    number: int

    @property
    def prompt(self) -> list[int]:
        numbers = random.Random(f"freeze {self.number}")
        return [numbers.randrange(256) for _ in range(5 + 7 * self.number)]

    @property
    def sampling(self) -> dict[str, float]:
        wild = {"temperature": 0.9, "top_p": 0.95, "seed": self.number}
        return {"max_tokens": TOKENS} | (wild if self.number % 2 else {})


ASKED = [Asked(number) for number in range(GENERATIONS)]


@pytest.fixture(scope="module")
def never_slept(tiny: Path) -> Iterator[list[list[int]]]:
    """What each of them says when nothing sleeps."""
    with EngineHost(dummy_spec(tiny, step_tokens=16)) as host:
        said = [host.ask(asked.prompt, **asked.sampling) for asked in ASKED]
        yield [one.wait().tokens for one in said]


def names(count: int = GENERATIONS) -> list[str]:
    return [f"r{number}" for number in range(count)]


async def ask_all(rank: EngineRank, asked: Sequence[Asked] = ASKED, scope: str = "") -> None:
    """Return with some of them in the middle of their texts, and the longest prompt not read to its end."""
    for one in asked:
        await rank.ask(f"r{one.number}", one.prompt, scope, **one.sampling)
    await rank.until(lambda: len(rank.tokens("r3")) >= 2)


async def stands_still(rank: EngineRank) -> None:
    await asyncio.sleep(0.05)
    before = {name: list(rank.tokens(name)) for name in names()}
    await asyncio.sleep(0.1)
    assert {name: rank.tokens(name) for name in names()} == before


@pytest.mark.parametrize("mode", MODES)
async def test_sixteen_generations_frozen_over_a_sleep_end_token_for_token_as_without_it(
    tiny: Path, never_slept: list[list[int]], mode: str
) -> None:
    """G2, greedy and seeded, in float32: with the cache kept they go on, with it discarded they are recomputed."""
    async with engine_rank(dummy_spec(tiny, step_tokens=16)) as rank:
        await ask_all(rank)
        free_bytes = rank.free_bytes()
        reply = await rank.sleep(restore={"kv_cache": mode}, drain=FREEZE)
        assert rank.free_bytes() == free_bytes + reply.freed_bytes
        status = await rank.core.status()
        assert (status.gate_reason, status.live_sequences) == (GateReason.ASLEEP, status.frozen_requests)
        assert status.frozen_requests == GENERATIONS
        assert rank.stats()["locked_pages"] == 0
        await stands_still(rank)
        assert any(0 < len(rank.tokens(name)) < TOKENS for name in names())
        assert any(not rank.tokens(name) for name in names()), "one had not begun to speak"
        await rank.wake()
        await rank.ended(*names())
        for name, expected in zip(names(), never_slept, strict=True):
            assert rank.tokens(name) == expected, name
            assert rank.last(name).finish_reason is FinishReason.LENGTH
        status = await rank.core.status()
        assert (status.gate_open, status.live_sequences, status.frozen_requests) == (True, 0, 0)
        assert rank.stats()["sequences"] == 0


def test_generations_frozen_over_a_sleep_to_disk_end_as_without_it(
    tiny: Path, tmp_path: Path, never_slept: list[list[int]]
) -> None:
    """G2, K3, at the ledger."""
    with EngineHost(dummy_spec(tiny, step_tokens=16), disk=tmp_path) as host:
        said = [host.ask(asked.prompt, **asked.sampling) for asked in ASKED]
        deadline = time.monotonic() + 30
        while len(said[3].events) < 2 and time.monotonic() < deadline:
            time.sleep(0.002)
        assert host.sleep(["kv_cache", "weights"], "disk") > 0
        assert host.engine.running() == GENERATIONS
        host.wake(["kv_cache", "weights"])
        assert [one.wait().tokens for one in said] == never_slept


@pytest.mark.parametrize("mode", ["none", "pinned"])
async def test_frozen_three_times_under_memory_pressure_no_token_is_wrong(
    tiny: Path, never_slept: list[list[int]], mode: str
) -> None:
    """G2: the pool holds a quarter of what they need, so that some are suspended, or let go, before and after."""
    # What is kept must fit beside what was suspended before.
    host_bytes = 2 * MIB if mode == "pinned" else 256 << 10
    kv = KvCacheConfig(tokens_per_block=8, gpu_bytes=256 << 10, host_bytes=host_bytes)
    device = Device.host(f"small-{uuid.uuid4().hex[:8]}", 16 * MIB, granularity_bytes=64 << 10)
    spec = dummy_spec(tiny, kv=kv, step_tokens=16)
    async with engine_rank(spec, make_device=lambda spec: device) as rank:
        await ask_all(rank)
        for said in (60, 250, 500):
            await rank.until(lambda said=said: sum(len(rank.tokens(name)) for name in names()) >= said)
            await rank.sleep("kv_cache", restore={"kv_cache": mode}, drain=FREEZE)
            await rank.wake("kv_cache")
        await rank.ended(*names())
        assert [rank.tokens(name) for name in names()] == never_slept
        assert rank.engine._loop._scheduler.preemptions > 0  # type: ignore[union-attr]


async def test_an_operation_that_is_aborted_thaws_and_they_go_on(
    tiny: Path, never_slept: list[list[int]]
) -> None:
    async with engine_rank(dummy_spec(tiny, step_tokens=16)) as rank:
        await ask_all(rank)
        operation = await rank.stage(Kind.SLEEP, restore={"kv_cache": "none"}, drain=FREEZE)
        await stands_still(rank)
        await rank.abort(operation)
        assert (await rank.core.status()).gate_open
        await rank.ended(*names())
        assert [rank.tokens(name) for name in names()] == never_slept


async def test_tags_that_go_one_by_one_and_come_one_by_one_thaw_with_the_last(
    tiny: Path, never_slept: list[list[int]]
) -> None:
    """C2, C3, G2: the second sleep would wait for requests, and none runs."""
    async with engine_rank(dummy_spec(tiny, step_tokens=16)) as rank:
        await ask_all(rank)
        await rank.sleep("weights", drain=FREEZE)
        await rank.sleep("kv_cache", restore={"kv_cache": "pinned"})
        await rank.sleep(restore={"kv_cache": "pinned"})  # C1: again, and nothing changes
        await rank.wake("kv_cache")
        await stands_still(rank)
        assert (await rank.core.status()).frozen_requests == GENERATIONS
        await rank.wake("weights")
        await rank.ended(*names())
        assert [rank.tokens(name) for name in names()] == never_slept


async def test_a_cache_that_is_discarded_in_its_sleep_is_recomputed(
    tiny: Path, never_slept: list[list[int]]
) -> None:
    """C1, G2: a weaker mode lets go of what a frozen request would have gone on from."""
    async with engine_rank(dummy_spec(tiny, step_tokens=16)) as rank:
        await ask_all(rank)
        await rank.sleep(restore={"kv_cache": "pinned"}, drain=FREEZE)
        held_bytes = rank.stats()["host_bytes"]
        await rank.sleep("kv_cache", restore={"kv_cache": "none"})
        assert rank.stats()["host_bytes"] < held_bytes
        await rank.wake()
        await rank.ended(*names())
        assert [rank.tokens(name) for name in names()] == never_slept


@pytest.mark.parametrize("mode", ["none", "pinned"])
async def test_a_client_that_leaves_while_frozen_frees_its_place_its_sequence_and_its_pages(
    tiny: Path, never_slept: list[list[int]], mode: str
) -> None:
    """G4: at once, not with the wake; the others lose nothing."""
    async with engine_rank(dummy_spec(tiny, step_tokens=16)) as rank:
        await ask_all(rank)
        await rank.sleep(restore={"kv_cache": mode}, drain=FREEZE)
        before = rank.stats()
        gone = names()[:8]
        await rank.core.cancel("front", gone)
        await rank.ended(*gone)
        assert {rank.last(name).finish_reason for name in gone} == {FinishReason.ABORT}
        after, status = rank.stats(), await rank.core.status()
        assert (status.live_sequences, status.frozen_requests) == (8, 8)
        assert after["held_pages"] < before["held_pages"]
        assert after["sequences"] < before["sequences"]
        await rank.wake()
        await rank.ended(*names()[8:])
        assert [rank.tokens(name) for name in names()[8:]] == never_slept[8:]
        assert rank.stats()["sequences"] == 0


async def test_a_client_that_leaves_during_the_transaction_is_let_go_after_it(tiny: Path) -> None:
    """M7, G4: the ranks compare what they hold, so that nobody may come or go meanwhile."""
    async with engine_rank(dummy_spec(tiny, step_tokens=16)) as rank:
        await ask_all(rank)
        operation = await rank.stage(Kind.SLEEP, restore={"kv_cache": "pinned"}, drain=FREEZE)
        sequences = rank.stats()["sequences"]
        await rank.core.cancel("front", names())
        await asyncio.sleep(0.1)
        assert rank.stats()["sequences"] == sequences > 0
        assert (await rank.core.status()).live_sequences == GENERATIONS
        await rank.abort(operation)
        await rank.ended(*names())
        assert (rank.stats()["sequences"], (await rank.core.status()).live_sequences) == (0, 0)


async def test_a_freeze_that_outlasts_its_time_ends_its_requests_with_what_they_have(tiny: Path) -> None:
    """G2: and their sequences, in their sleep."""
    async with engine_rank(dummy_spec(tiny, step_tokens=16)) as rank:
        await ask_all(rank)
        spec = DrainSpec(DrainMode.FREEZE, freeze_timeout_s=0.2)
        await rank.sleep(restore={"kv_cache": "pinned"}, drain=spec)
        await rank.ended(*names())
        for name in names():
            assert rank.last(name).finish_reason is FinishReason.ABORT
            assert rank.last(name).completion_tokens == len(rank.tokens(name)) < TOKENS
        assert rank.stats()["sequences"] == rank.stats()["held_pages"] == 0
        assert (await rank.core.status()).live_sequences == 0
        await rank.wake()
        await rank.ask("next", ASKED[0].prompt, **ASKED[0].sampling)
        await rank.ended("next")
        assert rank.last("next").finish_reason is FinishReason.LENGTH


async def test_an_aborting_sleep_ends_what_an_earlier_one_has_frozen(tiny: Path) -> None:
    async with engine_rank(dummy_spec(tiny, step_tokens=16)) as rank:
        await ask_all(rank)
        await rank.sleep("weights", drain=FREEZE)
        operation = await rank.stage(Kind.SLEEP, ["kv_cache"], drain=DrainSpec(DrainMode.ABORT))
        await rank.ended(*names())
        assert {rank.last(name).finish_reason for name in names()} == {FinishReason.ABORT}
        assert (await rank.core.status()).live_sequences == 0
        await rank.abort(operation)
        await rank.wake()
        assert (await rank.core.status()).gate_open


async def test_a_front_end_that_dies_while_its_requests_are_frozen_loses_them(tiny: Path) -> None:
    """G4: the lease runs on in the sleep."""
    now_s = [0.0]
    async with engine_rank(dummy_spec(tiny, step_tokens=16), renews=False, clock=lambda: now_s[0]) as rank:
        await ask_all(rank)
        await rank.sleep(drain=FREEZE, restore={"kv_cache": "pinned"})
        assert rank.stats()["held_pages"] > 0
        now_s[0] = 10.1
        await rank.until(lambda: rank.stats()["sequences"] == 0, 5.0)
        status = await rank.core.status()
        assert (status.live_sequences, rank.stats()["held_pages"]) == (0, 0)


async def test_places_of_frozen_requests_are_taken_when_the_gate_opens_again(tiny: Path) -> None:
    """G1, G2: what is frozen still counts among the requests that the engine may hold."""
    limits = {"max_running": 2, "max_waiting": 2}
    kv = KvCacheConfig(tokens_per_block=8, gpu_bytes=2 * MIB, host_bytes=2 * MIB)
    async with engine_rank(dummy_spec(tiny, kv=kv, **limits)) as rank:
        for name in ("a", "b", "c", "d"):
            await rank.ask(name, [1, 2, 3], max_tokens=200)
            if name in ("a", "b"):
                await rank.until(lambda name=name: bool(rank.tokens(name)))
        await rank.sleep(drain=FREEZE)
        await rank.wake()
        with pytest.raises(AssertionError, match="full"):
            await rank.ask("e", [1, 2, 3], max_tokens=4)
        await rank.ended("a", "b", "c", "d")
        assert rank.tokens("a") == rank.tokens("b") == rank.tokens("c") == rank.tokens("d")
