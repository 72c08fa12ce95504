"""The coordinator dies at every step; the next one on the same journal brings all to an end (the in-doubt table, M6)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from coordinator_crash import CrashPoint
from coordinator_rig import PATIENCE_S, RANK_BYTES, SLEEP, WAKE, Rig, asking
from coordinator_virtual_time import run

from torpor.actors.coordinator import Fault
from torpor.actors.messages import (
    Kind,
    LedgerPhase,
    ModelState,
    OnConflict,
    Operation,
    OperationState,
    RejectCode,
)

BOTH = {"kv_cache", "weights"}


def assert_settled(rig: Rig, kind: Kind, operation: Operation | None, decided: bool) -> None:
    """All ranks agree with each other, with the decision, and with the outcome; the gate says the same."""
    parked = rig.parked()
    assert parked.count(parked[0]) == 3, f"half asleep: {parked}"
    asleep = parked[0] == BOTH
    assert all(rank.ledger.phase is LedgerPhase.IDLE for rank in rig.chat)
    assert rig.gate_open() is not asleep
    assert (asleep if kind is Kind.SLEEP else not asleep) is decided
    used = 0 if asleep else RANK_BYTES
    assert [rank.device.used.get(rank.ledger.owner, 0) for rank in rig.chat] == [used] * 3
    assert all(rank.ledger.kept == {} or asleep for rank in rig.chat)
    assert rig.coordinator.reserved_bytes() == 0
    if operation is None:
        assert not decided
    else:
        assert operation.state is (OperationState.SUCCEEDED if decided else OperationState.REJECTED), (
            operation
        )
        assert operation.finished_at is not None


async def crash(rig: Rig, kind: Kind, at: int, delay_s: float) -> CrashPoint:
    """An operation whose coordinator dies at the given step; or, beyond the last step, just ends."""
    if kind is Kind.WAKE:
        await rig.do(SLEEP)
    for rank in rig.chat:
        rank.delay_s = dict.fromkeys(("preflight", "drain", "stage", "commit", "publish", "abort"), delay_s)
    point = CrashPoint(rig, at)
    work = asyncio.create_task(rig.do(asking(kind)))
    point.arm(work)
    died = asyncio.create_task(point.dead.wait())
    await asyncio.wait({work, died}, return_when=asyncio.FIRST_COMPLETED)
    died.cancel()
    work.cancel()
    await asyncio.gather(work, died, return_exceptions=True)
    return point


async def found(rig: Rig, number: int) -> Operation | None:
    try:
        return await rig.coordinator.operation(f"op-{number}")
    except KeyError:
        return None


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
@pytest.mark.parametrize("kind", [Kind.SLEEP, Kind.WAKE])
def test_a_coordinator_that_dies_at_any_step_leaves_nothing_open(
    tmp_path: Path, kind: Kind, delay_s: float
) -> None:
    """F25. With a delay, what the dead coordinator has asked for is still under way when the next one comes."""
    names: list[str] = []

    async def one(at: int) -> bool:
        rig = Rig(tmp_path / f"journal-{at}.db")
        await rig.start()
        try:
            point = await crash(rig, kind, at, delay_s)
            if not point.crashed:
                return False
            names.append(point.name)
            point.disarm()
            await rig.restart()
            await asyncio.sleep(60.0)
            number = 1 if kind is Kind.SLEEP else 2
            decided = await rig.journal.is_decided(f"op-{number}")
            assert_settled(rig, kind, await found(rig, number), decided)
            assert (await rig.coordinator.model("chat")).state in (ModelState.AWAKE, ModelState.ASLEEP)
            for again in (SLEEP, WAKE):
                assert (await rig.do(again)).state is OperationState.SUCCEEDED, point.name
        except AssertionError as error:
            raise AssertionError(f"died {point.name}: {error}") from error
        finally:
            await rig.stop()
        return True

    at = 1
    while run(one(at)):
        at += 1
    methods = {name.split()[1] for name in names}
    assert {
        "preflight",
        "stage",
        "commit",
        "publish",
        "journal_begin",
        "journal_decide",
        "journal_finish",
    } <= methods
    assert at > 30


@pytest.mark.parametrize("first", [1, 7, 13])
def test_a_coordinator_that_dies_again_while_it_settles_leaves_nothing_open(
    tmp_path: Path, first: int
) -> None:
    """Every step of a sleep, sampled, against every step of the restart that follows it."""

    async def one(at: int, again_at: int) -> bool:
        rig = Rig(tmp_path / f"journal-{at}-{again_at}.db")
        await rig.start()
        try:
            point = await crash(rig, Kind.SLEEP, at, 0.0)
            if not point.crashed:
                return False
            await rig.stop()
            second = await die_in_start(rig, again_at)
            second.disarm()
            if second.crashed:
                await rig.restart()
            await asyncio.sleep(60.0)
            assert_settled(rig, Kind.SLEEP, await found(rig, 1), await rig.journal.is_decided("op-1"))
            return second.crashed
        finally:
            await rig.stop()

    for at in range(first, 60, 18):
        again_at = 1
        while run(one(at, again_at)):
            again_at += 1


async def die_in_start(rig: Rig, at: int) -> CrashPoint:
    await rig.prepare()
    point = CrashPoint(rig, at)
    start = asyncio.create_task(rig.coordinator.start())
    point.arm(start)
    await asyncio.gather(start, return_exceptions=True)
    return point


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_died_with_the_coordinator_after_the_decision_does_not_stop_the_others(
    rig: Rig, rank: int
) -> None:
    async def story() -> None:
        point = CrashPoint(rig, at=0)
        work = asyncio.create_task(rig.do(SLEEP))
        point.arm(work)
        point.name_at = "after journal_decide"
        await asyncio.gather(work, return_exceptions=True)
        assert point.crashed
        point.disarm()
        rig.chat[rank].die()
        await rig.restart()
        operation = await rig.coordinator.wait("op-1", PATIENCE_S)
        assert operation.state is OperationState.FAILED and operation.ranks[rank].reason
        for other in rig.chat:
            assert other.dead or set(other.ledger.parked) == BOTH
        assert (await rig.coordinator.model("chat")).state is ModelState.FAILED
        assert not rig.gate_open()

    rig.run(story)


def test_a_rank_that_is_silent_at_the_restart_is_asked_until_it_answers(rig: Rig) -> None:
    """A time-out is unknown, not failed."""

    async def story() -> None:
        for rank in rig.chat:
            rank.delay_s = {"commit": 1.0}
        await rig.coordinator.submit(SLEEP)
        await asyncio.sleep(0.5)
        rig.chat[1].fault("status", Fault.HANG, 3)
        await rig.restart()
        view = (await rig.coordinator.models())[0]
        assert view.state is ModelState.RECOVERING and "rank 1 did not answer" in view.error
        assert (await rig.do(asking(Kind.SLEEP, "solo"))).state is OperationState.SUCCEEDED, (
            "others need not wait"
        )
        await asyncio.sleep(120.0)
        assert (await rig.coordinator.operation("op-1")).state is OperationState.SUCCEEDED
        assert (await rig.coordinator.model("chat")).state is ModelState.ASLEEP

    rig.run(story)


def test_a_rank_that_never_answers_again_does_not_keep_operations_open(rig: Rig) -> None:
    """C6: who waited long enough counts as gone, the others commit, and the model is failed."""

    async def story() -> None:
        rig.chat[2].fault("commit", Fault.HANG, 1000)
        await rig.coordinator.submit(SLEEP)
        await asyncio.sleep(0.5)
        rig.chat[2].fault("status", Fault.HANG, 1000)
        await rig.restart()
        began_s = rig.loop_time()
        operation = await rig.coordinator.wait("op-1")
        assert rig.loop_time() - began_s < 200.0
        assert operation.state is OperationState.FAILED
        assert [set(rank.ledger.parked) for rank in rig.chat[:2]] == [BOTH, BOTH]
        view = (await rig.coordinator.models())[0]
        assert view.state is ModelState.FAILED and "rank 2 did not answer" in view.error
        assert not rig.gate_open()

    rig.run(story)


def test_a_coordinator_that_dies_while_a_large_model_loads_gives_it_its_whole_time(rig: Rig) -> None:
    """M6: loading may take deadlines.load_s, far longer than a silent rank is waited for."""

    async def story() -> None:
        rig.chat[1].loaded = False
        await rig.restart()
        await asyncio.sleep(0.75 * rig.config.deadlines.load_s)
        view = (await rig.coordinator.models())[0]
        assert view.state is ModelState.RECOVERING and "rank 1 is not loaded yet" in view.error
        rig.chat[1].loaded = True
        await asyncio.sleep(60.0)
        assert (await rig.coordinator.models())[0].state is ModelState.AWAKE

    rig.run(story)


def test_a_rank_whose_engine_has_stopped_is_found_at_the_start(rig: Rig) -> None:
    async def story() -> None:
        rig.chat[1].error = "the engine has stopped"
        await rig.restart()
        view = (await rig.coordinator.models())[0]
        assert view.state is ModelState.FAILED and view.error == "rank 1: the engine has stopped"

    rig.run(story)


def test_who_waits_for_a_model_that_fails_is_told_so(rig: Rig) -> None:
    async def story() -> None:
        rig.chat[1].loaded = False
        await rig.restart()
        waiting = await rig.coordinator.submit(asking(Kind.SLEEP, on_conflict=OnConflict.WAIT))
        await asyncio.sleep(1.0)
        await rig.coordinator.fail("chat", "its loading failed")
        outcome = await rig.coordinator.wait(waiting.id, 1.0)
        assert (outcome.state, outcome.code) == (OperationState.REJECTED, RejectCode.WRONG_STATE)
        assert "its loading failed" in (outcome.reason or "")

    rig.run(story)


def test_a_failed_model_stays_failed_over_a_restart_until_its_ranks_are_replaced(rig: Rig) -> None:
    async def story() -> None:
        rig.chat[2].fault("stage", Fault.DIE)
        assert (await rig.do(SLEEP)).state is OperationState.FAILED
        await rig.restart()
        assert (await rig.coordinator.model("chat")).state is ModelState.FAILED
        fresh = Rig(rig.journal_path.with_name("unused.db")).chat
        await rig.coordinator.attach("chat", fresh)
        assert (await rig.coordinator.model("chat")).state is ModelState.AWAKE
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED
        assert [set(rank.ledger.parked) for rank in fresh] == [BOTH] * 3

    rig.run(story)


def test_a_model_whose_gate_is_closed_for_good_does_not_count_as_awake_when_all_ranks_are_there_again(
    rig: Rig,
) -> None:
    async def story() -> None:
        rig.chat[0].gate.fail()
        await rig.restart()
        view = await rig.coordinator.model("chat")
        assert view.state is ModelState.FAILED and "recover the model" in view.error

    rig.run(story)
