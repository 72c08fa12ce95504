"""Faults that others met, provoked with real actors on host devices (docs/faults.md)."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
from ranks.front_doors import served
from ranks.torpors import CAPACITY_BYTES, MIB, MakeTorpor, Torpor, read, request
from ranks.toys import KV_BYTES, WEIGHTS_BYTES

from torpor.actors.config import Deadlines
from torpor.actors.messages import (
    Kind,
    ModelState,
    Operation,
    OperationRequest,
    OperationState,
    RankOutcome,
    RejectCode,
)
from torpor.actors.ports import GateClosed, Inference
from torpor.native import Device, Ledger

ALL_BYTES = WEIGHTS_BYTES + KV_BYTES
SUCCEEDED, REJECTED = OperationState.SUCCEEDED, OperationState.REJECTED


async def do(torpor: Torpor, kind: Kind, model: str = "toy", **more: object) -> Operation:
    operation = await torpor.control.submit(OperationRequest(kind, model, **more))  # type: ignore[arg-type]
    return await torpor.control.wait(operation.id, 30)


async def say(torpor: Torpor, model: str = "toy") -> str:
    return "".join(event.text for event in await read(torpor.cluster.inference, request(3), model))


async def test_requests_in_a_tight_loop_across_the_gates_edge_all_end_however_often_it_is_closed(
    make_torpor: MakeTorpor,
) -> None:
    """F2, F3, F20, C1, C4: from two front ends, while each sleep and each wake is asked for four times at once."""
    torpor = await make_torpor().loaded()
    front_ends = [torpor.new_front_end() for _ in range(2)]
    stop, served_, refused = asyncio.Event(), 0, 0

    async def ask(inference: Inference) -> None:
        nonlocal served_, refused
        while not stop.is_set():
            try:
                async with asyncio.timeout(10):
                    events = await read(inference, request(3))
            except GateClosed:
                refused += 1
                await asyncio.sleep(0.01)
            else:
                assert "".join(event.text for event in events) == "xxx"
                served_ += 1

    clients = [asyncio.create_task(ask(front_ends[number % 2])) for number in range(8)]
    for _ in range(3):
        for kind, free in ((Kind.SLEEP, CAPACITY_BYTES), (Kind.WAKE, CAPACITY_BYTES - ALL_BYTES)):
            operations = await asyncio.gather(*(do(torpor, kind) for _ in range(4)))
            assert {operation.state for operation in operations} == {SUCCEEDED}, operations
            assert torpor.free_bytes(0) == free
    stop.set()
    await asyncio.gather(*clients)
    assert served_ > 20 and refused > 0
    for front_end in front_ends:
        await front_end.close()


async def test_wakes_without_memory_leak_nothing_and_two_at_once_do_not_share_the_same_bytes(
    make_torpor: MakeTorpor,
) -> None:
    """F5, F23, M4: ten times over; then there is room for one of two. `verify` compares checksums on the way back."""
    torpor = await make_torpor(models=("toy", "two")).loaded()
    for model in ("toy", "two"):
        assert (await do(torpor, Kind.SLEEP, model, verify=True)).state is SUCCEEDED
    thief = Ledger(Device.host(torpor.device_name(0), CAPACITY_BYTES))
    stolen = thief.create_region("stolen", CAPACITY_BYTES - ALL_BYTES + 2 * MIB)
    for _ in range(10):
        refused = await do(torpor, Kind.WAKE)
        assert (refused.state, refused.code) == (REJECTED, RejectCode.DEVICE_MEMORY)
        assert torpor.free_bytes(0) == ALL_BYTES - 2 * MIB
    del stolen, thief
    thief = Ledger(Device.host(torpor.device_name(0), CAPACITY_BYTES))
    stolen = thief.create_region("stolen", CAPACITY_BYTES - ALL_BYTES - ALL_BYTES // 2)
    both = await asyncio.gather(*(do(torpor, Kind.WAKE, model) for model in ("toy", "two")))
    assert sorted(operation.state for operation in both) == [REJECTED, SUCCEEDED]
    assert torpor.free_bytes(0) == ALL_BYTES // 2
    loser, winner = sorted(both, key=lambda operation: operation.state is SUCCEEDED)
    assert loser.code is RejectCode.DEVICE_MEMORY
    assert await say(torpor, winner.model) == "xxx"
    del stolen, thief
    assert (await do(torpor, Kind.WAKE, loser.model)).state is SUCCEEDED
    assert await say(torpor, loser.model) == "xxx"


async def test_a_rank_that_is_silent_or_fails_late_is_no_success_and_confuses_nothing_afterwards(
    make_torpor: MakeTorpor,
) -> None:
    """F7, F8, C6: rank 1 stands still, then fails when its stage is given up already; then it is asked once more."""
    faults = {1: {"fail_at": 1, "delay": {"create_host": 2.0}}}
    deadlines = Deadlines(drain_s=10, preflight_s=1.5, stage_s=10, load_s=60)
    torpor = await make_torpor(ranks=2, faults=faults, deadlines=deadlines).loaded()
    awake = [CAPACITY_BYTES - ALL_BYTES] * 2
    silent = (await torpor.view()).ranks[1].pid
    os.kill(silent, signal.SIGSTOP)
    began_s = time.monotonic()
    rejected = await do(torpor, Kind.SLEEP)
    assert (rejected.state, rejected.code) == (REJECTED, RejectCode.STAGE_TIMEOUT), rejected
    assert rejected.ranks[1].outcome is RankOutcome.UNKNOWN
    assert time.monotonic() - began_s < 15
    os.kill(silent, signal.SIGCONT)
    late = await do(torpor, Kind.SLEEP, timeout_s=1.0)
    assert late.state is not SUCCEEDED, late
    view = await torpor.view()
    assert view.state is not ModelState.ASLEEP and [rank.rank for rank in view.ranks] == [0, 1]
    view = await torpor.until(lambda view: view.state is ModelState.AWAKE and view.gate_open)
    assert [torpor.free_bytes(rank) for rank in range(2)] == awake
    assert await say(torpor) == "xxx"
    slept = await do(torpor, Kind.SLEEP)
    assert slept.state is SUCCEEDED, slept
    assert [rank.freed_bytes for rank in slept.ranks] == [ALL_BYTES] * 2
    assert [torpor.free_bytes(rank) for rank in range(2)] == [CAPACITY_BYTES] * 2


async def test_a_caller_that_gives_up_and_asks_again_gets_the_one_operation(make_torpor: MakeTorpor) -> None:
    """F10, C5, C7: with a key and without one, and once more when it is over."""
    torpor = await make_torpor(faults={0: {"delay": {"unmap_range": 1.5}}}).loaded()
    async with served(torpor) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        key = {"Idempotency-Key": "once"}
        try:
            await client.post("/sleep", json={}, headers=key, timeout=1.0)
        except httpx.ReadTimeout:
            pass
        else:
            raise AssertionError("the sleep was over before the caller gave up: nothing was tested")
        again, without = await asyncio.gather(
            client.post("/sleep", json={}, headers=key), client.post("/sleep", json={})
        )
        after = await client.post("/sleep", json={}, headers=key)
    ids = {answer.raise_for_status().json()["id"] for answer in (again, without, after)}
    operations = await torpor.control.operations("toy")
    assert [operation.kind for operation in operations] == [Kind.SLEEP]
    assert ids == {operations[0].id}
    assert torpor.free_bytes(0) == CAPACITY_BYTES


async def test_a_call_of_a_device_that_fails_leaves_every_rank_as_it_was_and_the_retry_works(
    make_torpor: MakeTorpor,
) -> None:
    """F6, M3: each rank's device fails at another call, in sleeps and in wakes."""
    ks = (1, 4, 7)
    torpor = await make_torpor(ranks=3, faults={rank: {"fail_at": k} for rank, k in enumerate(ks)}).loaded()
    rejected = 0
    for kind, before in ((Kind.SLEEP, CAPACITY_BYTES - ALL_BYTES), (Kind.WAKE, CAPACITY_BYTES)) * 3:
        while (operation := await do(torpor, kind)).state is REJECTED:
            rejected += 1
            assert rejected <= len(ks), operation
            assert [torpor.free_bytes(rank) for rank in range(3)] == [before] * 3
        assert operation.state is SUCCEEDED, operation
    assert rejected > 0
    assert await say(torpor) == "xxx"
