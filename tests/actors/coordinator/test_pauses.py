"""Pause, unpause and reset over the ranks of a model: all or none, what is published of them, and who joins whom."""

from __future__ import annotations

import asyncio

import pytest
from coordinator_rig import SLEEP, WAKE, Rig, asking

from torpor.actors.coordinator import Fault
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    GateReason,
    Kind,
    ModelState,
    ModelView,
    OnConflict,
    OperationState,
)

PAUSE = asking(Kind.PAUSE, tags=())
UNPAUSE = asking(Kind.UNPAUSE, tags=())
RESET = asking(Kind.RESET, tags=())


async def view(rig: Rig) -> ModelView:
    return (await rig.coordinator.models())[0]


def test_a_paused_model_is_awake_with_a_closed_gate_on_every_rank_and_after_a_restart(rig: Rig) -> None:
    async def story() -> None:
        before = rig.free_bytes()
        for _ in range(2):  # C1
            assert (await rig.do(PAUSE)).state is OperationState.SUCCEEDED
        assert [rank.ledger.paused for rank in rig.chat] == [True] * 3
        await rig.restart()
        shown = await view(rig)
        assert (shown.state, shown.paused, shown.gate_reason) == (ModelState.AWAKE, True, GateReason.PAUSED)
        assert not shown.hold and rig.free_bytes() == before
        for _ in range(2):
            assert (await rig.do(UNPAUSE)).state is OperationState.SUCCEEDED
        assert [rank.ledger.paused for rank in rig.chat] == [False] * 3
        assert not (await view(rig)).paused
        rig.assert_untouched(before)

    rig.run(story)


def test_an_unpause_of_a_model_that_is_not_paused_closes_no_gate(rig: Rig) -> None:
    """C1: requests go on."""

    async def story() -> None:
        rig.chat[0].gate.running = 2
        done = await rig.do(UNPAUSE)
        assert done.state is OperationState.SUCCEEDED
        assert {rank.outcome for rank in done.ranks} == {"committed"}
        assert "drain" not in rig.chat[0].calls and "stage" not in rig.chat[0].calls
        assert rig.gate_open() and rig.chat[0].gate.running == 2

    rig.run(story)


def test_a_pause_and_a_sleep_end_in_either_order(rig: Rig) -> None:
    """C3."""

    async def story() -> None:
        for first, second in ((WAKE, UNPAUSE), (UNPAUSE, WAKE)):
            await rig.do(PAUSE)
            await rig.do(SLEEP)
            assert (await view(rig)).gate_reason is GateReason.ASLEEP and (await view(rig)).paused
            await rig.do(first)
            assert not rig.gate_open()
            expected = GateReason.PAUSED if first is WAKE else GateReason.ASLEEP
            assert (await view(rig)).gate_reason is expected
            await rig.do(second)
            assert rig.gate_open() and (await view(rig)).gate_open

    rig.run(story)


@pytest.mark.parametrize(
    ("mode", "left", "aborted"),
    [(DrainMode.ABORT, 0, 2), (DrainMode.FREEZE, 2, 0), (DrainMode.FINISH, 2, 0)],
)
def test_a_pause_does_with_requests_as_its_mode_says(
    rig: Rig, mode: DrainMode, left: int, aborted: int
) -> None:
    """G2."""

    async def story() -> None:
        rig.chat[0].gate.running = 2
        done = await rig.do(asking(Kind.PAUSE, tags=(), drain=DrainSpec(mode, 1.0)))
        waited_in_vain = mode is DrainMode.FINISH
        assert done.state is (OperationState.REJECTED if waited_in_vain else OperationState.SUCCEEDED)
        assert (rig.chat[0].gate.running, done.aborted_requests) == (left, aborted)
        assert rig.gate_open() is waited_in_vain

    rig.run(story)


@pytest.mark.parametrize("phase", ["preflight", "stage"])
def test_a_rank_that_cannot_be_paused_leaves_the_others_as_they_were(rig: Rig, phase: str) -> None:
    """M3."""

    async def story() -> None:
        before = rig.free_bytes()
        rig.chat[2].fault(phase, Fault.REFUSE)
        assert (await rig.do(PAUSE)).state is OperationState.REJECTED
        assert not any(rank.ledger.paused for rank in rig.chat)
        rig.assert_untouched(before)

    rig.run(story)


def test_equal_pauses_are_one_and_every_reset_is_its_own(rig: Rig) -> None:
    """C4; what was computed between two resets is forgotten by the second."""

    async def story() -> None:
        for rank in rig.chat:
            rank.delay_s["stage"] = 1.0
        for wish, count in ((PAUSE, 1), (UNPAUSE, 1), (RESET, 2)):
            begun = []
            for _ in range(2):
                begun.append(
                    (await rig.coordinator.submit(asking(wish.kind, tags=(), on_conflict=OnConflict.WAIT))).id
                )
                await asyncio.sleep(0.2)
            assert len(set(begun)) == count
            for one in begun:
                assert (await rig.coordinator.wait(one, 30)).state is OperationState.SUCCEEDED
        assert [rank.ledger.resets for rank in rig.chat] == [2] * 3

    rig.run(story)


def test_a_reset_that_wants_an_idle_model_harms_nobody_where_requests_run(rig: Rig) -> None:
    async def story() -> None:
        rig.chat[0].gate.running = 1
        wish = asking(Kind.RESET, tags=(), drain=DrainSpec(DrainMode.IF_IDLE))
        assert (await rig.do(wish)).code == "not_idle"
        assert rig.gate_open() and not any(rank.ledger.resets for rank in rig.chat)
        rig.chat[0].gate.running = 0
        assert (await rig.do(wish)).state is OperationState.SUCCEEDED
        await rig.do(SLEEP)
        assert (await rig.do(wish)).state is OperationState.SUCCEEDED
        assert [rank.ledger.resets for rank in rig.chat] == [2] * 3
        assert (await view(rig)).hold, "it is held asleep as before"

    rig.run(story)


def test_a_pause_is_known_by_its_ranks_where_the_journal_was_lost(rig: Rig) -> None:
    """M6."""

    async def story() -> None:
        await rig.do(PAUSE)
        await rig.stop()
        for file in rig.journal_path.parent.glob("journal.db*"):
            file.unlink()
        await rig.start()
        shown = await view(rig)
        assert (shown.paused, shown.gate_reason) == (True, GateReason.PAUSED)
        assert (await rig.do(UNPAUSE)).state is OperationState.SUCCEEDED
        assert rig.gate_open() and (await view(rig)).gate_open

    rig.run(story)


@pytest.mark.parametrize(("phase", "paused"), [("stage", False), ("commit", True)])
def test_a_pause_whose_coordinator_dies_ends_as_decided(rig: Rig, phase: str, paused: bool) -> None:
    """M6: the table of what is in doubt."""

    async def story() -> None:
        rig.chat[1].fault(phase, Fault.HANG)
        begun = await rig.coordinator.submit(PAUSE)
        await asyncio.sleep(1.0)
        await rig.restart()
        await asyncio.sleep(60.0)
        assert [rank.ledger.paused for rank in rig.chat] == [paused] * 3
        done = await rig.coordinator.operation(begun.id)
        assert done.state is (OperationState.SUCCEEDED if paused else OperationState.REJECTED)
        assert ((await view(rig)).paused, rig.gate_open()) == (paused, not paused)

    rig.run(story)
