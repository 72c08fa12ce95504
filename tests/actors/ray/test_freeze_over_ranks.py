"""Generations frozen over a sleep of three tensor-parallel ranks in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import ray
from ranks.torpors import MIB, MakeTorpor, until
from support.engine_host import write_config

from torpor.actors.config import EngineConfig, KvCacheConfig
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    FinishReason,
    GenerateRequest,
    Kind,
    Operation,
    OperationRequest,
    OperationState,
    RestoreMode,
    Sampling,
    TokenEvent,
)
from torpor.actors.ports import Inference

CACHE = KvCacheConfig(tokens_per_block=8, gpu_bytes=4 * MIB, host_bytes=4 * MIB)
TOKENS, COUNT = 64, 4


class Reading:
    """One generation, read as it comes. Every second one samples."""

    def __init__(self, inference: Inference, number: int, name: str) -> None:
        sampling = Sampling(
            max_tokens=TOKENS, temperature=0.8 * (number % 2), seed=number if number % 2 else None
        )
        prompt = tuple(range(3, 20 + 9 * number))
        self._request = GenerateRequest(f"{name}-{number}", token_ids=prompt, sampling=sampling, scope=name)
        self.events: list[TokenEvent] = []
        self.task = asyncio.create_task(self._read(inference))

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    async def _read(self, inference: Inference) -> None:
        async for event in inference.generate("toy", self._request):
            self.events.append(event)


async def test_generations_frozen_over_ranks_outlive_the_coordinator_and_end_as_without_the_sleep(
    make_torpor: MakeTorpor, tmp_path: Path
) -> None:
    """G2, F24, M6: kept, then discarded; the coordinator is killed while they are frozen."""
    engine = EngineConfig(model=str(write_config(tmp_path)), load_format="dummy")
    torpor = await make_torpor(ranks=3, engine=engine, kv_cache=CACHE).loaded()
    inference = torpor.cluster.inference

    async def operate(request: OperationRequest) -> Operation:
        operation = await torpor.control.wait((await torpor.control.submit(request)).id, 60)
        assert operation.state is OperationState.SUCCEEDED, operation
        return operation

    async def ended(readings: list[Reading]) -> list[list[int]]:
        await asyncio.wait_for(asyncio.gather(*(reading.task for reading in readings)), 60)
        assert {reading.events[-1].finish_reason for reading in readings} == {FinishReason.LENGTH}
        return [reading.tokens for reading in readings]

    expected = await ended([Reading(inference, number, "awake") for number in range(COUNT)])
    readings = [Reading(inference, number, "frozen") for number in range(COUNT)]
    for mode in (RestoreMode.PINNED, RestoreMode.NONE):
        said = [len(reading.tokens) for reading in readings]

        async def more(said: list[int] = said) -> bool:
            return all(len(r.tokens) > before + 2 for r, before in zip(readings, said, strict=True))

        await until(more, bool, 30)
        freeze = DrainSpec(DrainMode.FREEZE)
        await operate(OperationRequest(Kind.SLEEP, "toy", restore={"kv_cache": mode}, drain=freeze))
        view = await torpor.view()
        assert (view.ranks[0].frozen_requests, view.ranks[0].live_sequences) == (COUNT, COUNT)
        if mode is RestoreMode.PINNED:
            os.kill(int(ray.get(torpor.coordinator().pid.remote())), signal.SIGKILL)
        await operate(OperationRequest(Kind.WAKE, "toy"))
    assert await ended(readings) == expected
    await paused_and_aborted(inference, operate, ended, expected)
    trimmed = await torpor.control.trim("toy", 0)
    assert [(one.rank, one.error) for one in trimmed] == [(0, ""), (1, ""), (2, "")], "M8"
    assert all(one.freed_bytes > 0 for one in trimmed), "what the sleeps had needed"


async def paused_and_aborted(
    inference: Inference,
    operate: Callable[[OperationRequest], Awaitable[Operation]],
    ended: Callable[[list[Reading]], Awaitable[list[list[int]]]],
    expected: list[list[int]],
) -> None:
    """G2, F12: the same without a sleep, prefixes forgotten meanwhile; and aborts by name, and of all."""
    readings = [Reading(inference, number, "kept") for number in range(COUNT)]
    await until(lambda: _true(all(reading.tokens for reading in readings)), bool, 30)
    await operate(OperationRequest(Kind.PAUSE, "toy", drain=DrainSpec(DrainMode.FREEZE)))
    said = [len(reading.tokens) for reading in readings]
    await operate(OperationRequest(Kind.RESET, "toy", drain=DrainSpec(DrainMode.FREEZE)))
    assert [len(reading.tokens) for reading in readings] == said
    await operate(OperationRequest(Kind.UNPAUSE, "toy"))
    assert await ended(readings) == expected
    readings = [Reading(inference, number, "gone") for number in range(COUNT)]
    await until(lambda: _true(all(reading.tokens for reading in readings)), bool, 30)
    assert await inference.abort_requests("toy", "gone-0") == 1
    await asyncio.wait_for(readings[0].task, 10)
    assert await inference.abort_requests("toy", None) >= 1
    await asyncio.wait_for(asyncio.gather(*(reading.task for reading in readings)), 10)
    assert {reading.events[-1].finish_reason for reading in readings} == {FinishReason.ABORT}


async def _true(value: bool) -> bool:
    return value
