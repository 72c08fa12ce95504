"""The whole way over several ranks: one that refuses, fails in stage, or is killed after the decision; clients at odds.

The default engine over real Ray, on host devices or one GPU a rank. Needs what the service needs.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time

import pytest

pytest.importorskip("ray")

import httpx
from multi.conftest import HOST_CAPACITY_BYTES, MakeServed, cache_of
from multi.rig import PROMPTS, Rig
from ranks.kills import TABLE, Kill, Scene, When, Who, pids
from ranks.torpors import Torpor, read
from support.kept_rows import keep_row

from torpor.actors.messages import (
    GenerateRequest,
    Kind,
    ModelState,
    OperationState,
    RankOutcome,
    RejectCode,
    Sampling,
)
from torpor.actors.ports import GateClosed, Inference
from torpor.native import Device, Ledger
from torpor.service.app import create_app
from torpor.service.client import AsyncClient, ProblemError
from torpor.service.gate.gates import Gates
from torpor.service.logs import make_logger

pytestmark = pytest.mark.long

RIG = Rig.of_environment()
TOKENS = 12
LEFT_BYTES = cache_of(RIG).gpu_bytes // 2  # what a thief leaves of a device
LOAD_S = 240.0
CONFLICT = 409
ROUNDS = max(RIG.cycles // 5, 2)
NOTES = "What several ranks went through over real Ray, with the default engine; seconds of the whole story."


def free_bytes(torpor: Torpor) -> list[int]:
    """Of each device, as this process, which has nothing of the ranks', sees it."""
    if RIG.on_gpus:
        return [Device.cuda(number).memory_info()[0] for number in range(RIG.ranks)]
    names = [torpor.device_name(number) for number in range(RIG.ranks)]
    return [Device.host(name, HOST_CAPACITY_BYTES).memory_info()[0] for name in names]


def alike(now: list[int], then: list[int]) -> bool:
    slack_bytes = 64 << 20 if RIG.on_gpus else 0
    return all(abs(a - b) <= slack_bytes for a, b in zip(now, then, strict=True))


async def answers(inference: Inference, name: str) -> list[list[int]]:
    """Greedy ones, all at once."""

    async def one(number: int, prompt: list[int]) -> list[int]:
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0)
        wanted = GenerateRequest(f"{name}-{number}", token_ids=tuple(prompt), sampling=sampling)
        return [token for event in await read(inference, wanted) for token in event.token_ids]

    return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(PROMPTS))))


async def loaded(torpor: Torpor) -> list[list[int]]:
    """What it says."""
    await torpor.cluster.wait_until_loaded(LOAD_S)
    return await answers(torpor.cluster.inference, "first")


def keep(story: str, began: float, **more: object) -> None:
    row = {"device": RIG.kind, "ranks": RIG.ranks, "story": story, "collectives": RIG.collectives}
    row |= {"seconds": round(time.monotonic() - began, 1)} | more
    keep_row("multi_protocol", ("device", "ranks", "story"), row, NOTES)


async def refusal(torpor: Torpor, said: list[list[int]]) -> None:
    """M4, F8: the last device has too little room for a wake; no rank wakes, and later all do."""
    awake = free_bytes(torpor)
    assert (await torpor.sleep()).state is OperationState.SUCCEEDED
    asleep = free_bytes(torpor)
    assert all(after - before >= cache_of(RIG).gpu_bytes for before, after in zip(awake, asleep, strict=True))
    last = RIG.ranks - 1
    device = Device.cuda(last) if RIG.on_gpus else Device.host(torpor.device_name(last), HOST_CAPACITY_BYTES)
    thief = Ledger(device)
    stolen = thief.create_region("workspace", (asleep[last] - LEFT_BYTES) // (2 << 20) * (2 << 20))
    operation = await torpor.wake()
    assert (operation.state, operation.code) == (OperationState.REJECTED, RejectCode.DEVICE_MEMORY), operation
    assert alike(free_bytes(torpor)[:last], asleep[:last])
    assert (await torpor.view()).state is ModelState.ASLEEP
    del stolen, thief
    assert (await torpor.wake()).state is OperationState.SUCCEEDED
    assert alike(free_bytes(torpor), awake)
    assert await answers(torpor.cluster.inference, "after a refusal") == said


async def at_odds(torpor: Torpor, said: list[list[int]]) -> dict[str, int]:
    """C4, C6, F10, F20: releases and resumes at the same time by the awaited client, and requests in between."""
    awake, control, counted = free_bytes(torpor), torpor.control, {"done": 0, "refused": 0, "closed": 0}
    config = await control.describe()
    inference = torpor.new_front_end()
    logger = make_logger(sys.stderr, logging.ERROR)
    app = create_app(control, inference, logger=logger, gates=Gates(config, control))
    transport = httpx.ASGITransport(app)
    async with AsyncClient("http://torpor.test", transport=transport, timeout_s=120) as client:

        async def ask(number: int) -> None:
            try:
                assert await answers(torpor.cluster.inference, f"at odds {number}") == said
            except GateClosed:
                counted["closed"] += 1

        kept = {"kv_cache": "pinned"}
        for number in range(ROUNDS):
            outcomes = await asyncio.gather(
                client.sleep("toy", on_conflict="wait", restore=kept),
                client.wake("toy", on_conflict="wait"),
                client.sleep("toy", restore=kept),
                client.wake("toy"),
                ask(number),
                return_exceptions=True,
            )
            for outcome in outcomes[:-1]:
                if isinstance(outcome, ProblemError):
                    assert outcome.status == CONFLICT, outcome
                    counted["refused"] += 1
                else:
                    assert isinstance(outcome, dict) and outcome["state"] == "succeeded", outcome
                    counted["done"] += 1
            assert outcomes[-1] is None, outcomes[-1]
        await client.wake("toy", on_conflict="wait")
    await inference.close()
    assert alike(free_bytes(torpor), awake)
    assert await answers(torpor.cluster.inference, "after all") == said
    return counted


def test_one_rank_refuses_and_clients_release_and_resume_at_once(make_served: MakeServed) -> None:
    began = time.monotonic()

    async def story() -> dict[str, int]:
        torpor = make_served()
        assert isinstance(torpor, Torpor)
        said = await loaded(torpor)
        await refusal(torpor, said)
        counted = await at_odds(torpor, said)
        await torpor.cluster.inference.close()  # type: ignore[attr-defined]
        return counted

    keep("one refuses; clients at odds", began, **asyncio.run(story()))


def test_one_rank_fails_in_stage_and_is_killed_after_the_decision(make_served: MakeServed) -> None:
    """M3, M6, F8, F25: as it was, and then all ranks are new ones that say the same."""
    began = time.monotonic()
    kill = next(
        one for one in TABLE if (one.who, one.kind, one.when) == (Who.FOLLOWER, Kind.SLEEP, When.COMMIT)
    )

    async def story() -> float:
        torpor = make_served({1: {"fail_at": 1} | Scene.faults(kill)[1]})
        assert isinstance(torpor, Torpor)
        said = await loaded(torpor)
        awake = free_bytes(torpor)
        operation = await torpor.sleep()
        assert operation.state is OperationState.REJECTED, operation
        assert operation.ranks[1].outcome is RankOutcome.FAILED
        assert [rank.freed_bytes for rank in operation.ranks] == [0] * RIG.ranks
        assert alike(free_bytes(torpor), awake)
        assert await answers(torpor.cluster.inference, "after a failed stage") == said
        recovered_s = await killed(torpor, kill)
        assert alike(free_bytes(torpor), awake)
        assert await answers(torpor.cluster.inference, "after the kill") == said
        await torpor.cluster.inference.close()  # type: ignore[attr-defined]
        return recovered_s

    recovered_s = asyncio.run(story())
    keep("one fails in stage; one is killed after the decision", began, recovered_s=round(recovered_s, 1))


async def killed(torpor: Torpor, kill: Kill) -> float:
    """Seconds from the kill until the model is awake with new ranks."""
    before, scene = set(await pids(torpor)), Scene(torpor, kill)
    operation = await scene.begin()
    await scene.strike()
    struck = time.monotonic()
    finished = await torpor.control.wait(operation.id, 60.0)
    assert finished.state is kill.outcome, finished
    await torpor.until(
        lambda view: (
            view.state is ModelState.AWAKE
            and len(view.ranks) == RIG.ranks
            and not before & {rank.pid for rank in view.ranks}
        ),
        LOAD_S,
    )
    return time.monotonic() - struck
