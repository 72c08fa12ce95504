"""Real processes are really killed: the coordinator, ranks, a front end (F25, M6)."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
import ray
from ranks.torpors import CAPACITY_BYTES, MakeTorpor, Torpor, is_in, read, request, until
from ranks.toys import KV_BYTES, WEIGHTS_BYTES

from torpor.actors.messages import (
    FinishReason,
    GateReason,
    Kind,
    LedgerPhase,
    ModelState,
    Operation,
    OperationRequest,
    OperationState,
)
from torpor.actors.ports import ControlUnreachable, GateClosed
from torpor.actors.ray.ports import RayControl

ALL_BYTES = WEIGHTS_BYTES + KV_BYTES
SLEEP = OperationRequest(Kind.SLEEP, "toy")


async def pids(torpor: Torpor) -> list[int]:
    return [status.pid for status in (await torpor.view()).ranks]


async def phase(torpor: Torpor, rank: int) -> LedgerPhase:
    return (await torpor.rank("toy", rank).status.remote()).ledger_phase


def coordinator_pid(torpor: Torpor) -> int:
    return int(ray.get(torpor.coordinator().pid.remote()))


async def test_a_coordinator_killed_after_the_decision_commits_forward_when_it_is_back(
    make_torpor: MakeTorpor,
) -> None:
    """In doubt: the decision is on disk and rank 2 is in the middle of its slow commit."""
    torpor = await make_torpor(ranks=3, faults={2: {"delay": {"unmap_range": 1.0}}}).loaded()
    before = await pids(torpor)
    pid = coordinator_pid(torpor)
    operation = await torpor.control.submit(SLEEP)
    await until(lambda: phase(torpor, 0), lambda phase: phase is LedgerPhase.COMMITTED, 10)
    assert await phase(torpor, 2) in (LedgerPhase.STAGED, LedgerPhase.COMMITTING), "the kill came too late"
    os.kill(pid, signal.SIGKILL)
    finished = await torpor.control.wait(operation.id, 30)
    assert finished.state is OperationState.SUCCEEDED, finished
    assert coordinator_pid(torpor) != pid
    assert await pids(torpor) == before
    assert [torpor.free_bytes(rank) for rank in range(3)] == [CAPACITY_BYTES] * 3
    assert (await torpor.view()).state is ModelState.ASLEEP
    assert (await torpor.wake()).state is OperationState.SUCCEEDED
    assert "".join(event.text for event in await read(torpor.cluster.inference, request(3))) == "xxx"


async def test_a_coordinator_killed_during_the_stage_leaves_the_model_awake_and_serving(
    make_torpor: MakeTorpor,
) -> None:
    """In doubt: no decision in the journal, so it is taken back."""
    torpor = await make_torpor(ranks=2, faults={1: {"delay": {"create_host": 1.5, "copy": 1.5}}}).loaded()
    before = await pids(torpor)
    operation = await torpor.control.submit(SLEEP)
    await until(lambda: phase(torpor, 0), lambda phase: phase is LedgerPhase.STAGED, 10)
    os.kill(coordinator_pid(torpor), signal.SIGKILL)
    finished = await torpor.control.wait(operation.id, 30)
    assert finished.state is OperationState.REJECTED, finished
    await torpor.until(lambda view: view.state is ModelState.AWAKE and view.gate_open)
    assert await pids(torpor) == before
    assert [torpor.free_bytes(rank) for rank in range(2)] == [CAPACITY_BYTES - ALL_BYTES] * 2
    assert "".join(event.text for event in await read(torpor.cluster.inference, request(3))) == "xxx"


async def test_a_coordinator_killed_during_the_drain_leaves_the_gate_open_again(
    make_torpor: MakeTorpor,
) -> None:
    torpor = await make_torpor().loaded()
    long = asyncio.create_task(read(torpor.cluster.inference, request(1500)))
    await asyncio.sleep(0.2)
    operation = await torpor.control.submit(SLEEP)
    await torpor.until(lambda view: view.gate_reason is GateReason.DRAINING, 5)
    os.kill(coordinator_pid(torpor), signal.SIGKILL)
    finished = await torpor.control.wait(operation.id, 30)
    assert finished.state is OperationState.REJECTED
    await torpor.until(lambda view: view.gate_open)
    events = await long
    assert sum(len(event.text) for event in events) == 1500, "who was being drained lost nothing"


async def test_a_coordinator_that_is_stopped_is_told_as_unreachable_and_requests_are_served_on(
    make_torpor: MakeTorpor,
) -> None:
    """As one that hangs, or whose node is cut off: nobody waits for it for ever, and it goes on where it was."""
    torpor = await make_torpor().loaded()
    control = RayControl(torpor.config.namespace, silent_s=2.0)
    assert (await control.model("toy")).state is ModelState.AWAKE
    pid = coordinator_pid(torpor)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ControlUnreachable, match="has not answered for 2 s"):
            await asyncio.wait_for(control.submit(SLEEP), 30)
        assert "".join(event.text for event in await read(torpor.cluster.inference, request(3))) == "xxx"
    finally:
        os.kill(pid, signal.SIGCONT)
    # It had heard: whoever asks again asks for the same.
    assert (
        await torpor.control.wait((await torpor.control.submit(SLEEP)).id, 30)
    ).state is OperationState.SUCCEEDED
    assert (await torpor.view()).state is ModelState.ASLEEP
    assert len([one for one in await torpor.control.operations("toy") if one.ranks[0].freed_bytes]) == 1


async def test_a_killed_follower_makes_the_model_failed_and_nothing_hangs(make_torpor: MakeTorpor) -> None:
    torpor = await make_torpor(ranks=2).loaded()
    running = asyncio.create_task(read(torpor.cluster.inference, request(1_000_000)))
    await asyncio.sleep(0.2)
    os.kill((await pids(torpor))[1], signal.SIGKILL)
    view = await torpor.until(is_in(ModelState.FAILED))
    assert not view.gate_open
    assert "rank 1" in view.error
    events = await asyncio.wait_for(running, 10)
    assert events[-1].finish_reason is FinishReason.ERROR
    with pytest.raises(GateClosed) as closed:
        await asyncio.wait_for(read(torpor.cluster.inference, request()), 10)
    assert closed.value.reason == GateReason.FAILED
    refused = await torpor.control.submit(SLEEP)
    assert refused.state is OperationState.REJECTED
    assert torpor.free_bytes(1) == CAPACITY_BYTES, "what the dead rank had is free"


async def test_a_killed_leader_ends_started_streams_with_an_error_and_closes_for_new_ones(
    make_torpor: MakeTorpor,
) -> None:
    """G3."""
    torpor = await make_torpor().loaded()
    streams = [asyncio.create_task(read(torpor.cluster.inference, request(1_000_000))) for _ in range(8)]
    await torpor.until(lambda view: view.ranks[0].live_sequences == 8, 5)
    await asyncio.sleep(0.2)
    os.kill((await pids(torpor))[0], signal.SIGKILL)
    for events in await asyncio.wait_for(asyncio.gather(*streams), 20):
        assert events[-1].finish_reason is FinishReason.ERROR
        assert events[-1].error
    with pytest.raises(GateClosed) as closed:
        await asyncio.wait_for(read(torpor.cluster.inference, request()), 20)
    assert closed.value.reason == GateReason.FAILED
    await torpor.until(is_in(ModelState.FAILED))


async def test_a_rank_killed_in_the_middle_of_a_sleep_ends_the_operation(make_torpor: MakeTorpor) -> None:
    torpor = await make_torpor(ranks=2, faults={1: {"delay": {"unmap_range": 2.0}}}).loaded()
    victim = (await pids(torpor))[1]
    operation: Operation = await torpor.control.submit(SLEEP)
    await until(lambda: phase(torpor, 0), lambda phase: phase is LedgerPhase.COMMITTED, 10)
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    finished = await torpor.control.wait(operation.id, 30)
    assert finished.state is OperationState.FAILED
    assert time.monotonic() - began < 15
    assert finished.ranks[0].freed_bytes == ALL_BYTES, "the other rank still commits, and says so"
    assert [torpor.free_bytes(rank) for rank in range(2)] == [CAPACITY_BYTES] * 2
    assert (await torpor.view()).state is ModelState.FAILED


async def test_a_front_end_that_ends_tells_its_streams_and_frees_their_places(
    make_torpor: MakeTorpor,
) -> None:
    """G3, G4: what a signal to the service comes to; nobody is told that the leader has died."""
    torpor = await make_torpor().loaded()
    inference = torpor.new_front_end()
    streams = [asyncio.create_task(read(inference, request(100_000))) for _ in range(3)]
    await torpor.until(lambda view: view.ranks[0].live_sequences == 3)
    await asyncio.sleep(0.3)  # each has begun to read
    await inference.close()
    for events in await asyncio.gather(*streams):
        assert events[-1].finish_reason is FinishReason.ERROR
        assert events[-1].error == "this front end is ending"
    await torpor.until(lambda view: view.ranks[0].live_sequences == 0)


async def test_a_front_end_that_was_taken_for_dead_ends_its_streams_and_connects_anew(
    make_torpor: MakeTorpor,
) -> None:
    """G3, G4: it was silent for too long, e.g. suspended; the leader has let go of it."""
    torpor = await make_torpor().loaded()
    inference = torpor.new_front_end()
    running = asyncio.create_task(read(inference, request(1_000_000)))
    await torpor.until(lambda view: view.ranks[0].live_sequences == 1, 5)
    (connection,) = inference.connections()
    await torpor.rank("toy", 0).detach.remote(connection.front_end)
    events = await asyncio.wait_for(running, 10)
    assert events[-1].finish_reason is FinishReason.ERROR
    assert "".join(event.text for event in await read(inference, request(3))) == "xxx"
    await torpor.until(lambda view: view.ranks[0].live_sequences == 0, 5)
    await inference.close()
