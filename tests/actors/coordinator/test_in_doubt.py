"""A rank that says nothing while an operation is taken back leaves its model in doubt, not failed (M6)."""

from __future__ import annotations

import asyncio

import pytest
from coordinator_rig import SLEEP, WAKE, Rig, asking

from torpor.actors.coordinator import Fault
from torpor.actors.messages import (
    GateReason,
    Kind,
    LedgerPhase,
    ModelState,
    OnConflict,
    OperationState,
    RankOutcome,
)

FOREVER = 1000


def silence(rig: Rig, rank: int) -> None:
    """From its stage on: it stages, and nobody hears of it."""
    rig.chat[rank].fault("stage", Fault.LOSE)

    def hush(moment: str, method: str, _: object) -> None:
        if (moment, method) == ("after", "stage"):
            for each in ("status", "abort"):
                rig.chat[rank].fault(each, Fault.HANG, FOREVER)

    rig.chat[rank].on_call = hush


def answer_again(rig: Rig, rank: int) -> None:
    rig.chat[rank].on_call = None
    rig.chat[rank]._faults.clear()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_silent_through_stage_doubt_and_abort_is_taken_back_when_it_answers_again(
    rig: Rig, rank: int
) -> None:
    """M6: in doubt, not failed for good; and the operation's outcome stays as it was told."""

    async def story() -> None:
        before = rig.free_bytes()
        silence(rig, rank)
        operation = await rig.do(SLEEP)
        assert operation.state is OperationState.FAILED and operation.reason
        assert operation.ranks[rank].outcome is RankOutcome.UNKNOWN
        assert rig.chat[rank].ledger.phase is LedgerPhase.STAGED
        (view, *_) = await rig.coordinator.models()
        assert (view.state, view.gate_reason) == (ModelState.RECOVERING, GateReason.IN_DOUBT)
        assert operation.id in view.error and not rig.gate_open()
        answer_again(rig, rank)
        await asyncio.sleep(120.0)
        assert (await rig.coordinator.model("chat")).state is ModelState.AWAKE
        rig.assert_untouched(before)
        found = await rig.coordinator.operation(operation.id)
        assert (found.state, found.reason) == (OperationState.FAILED, operation.reason)
        await rig.restart()
        found = await rig.coordinator.operation(operation.id)
        assert (found.state, found.reason) == (OperationState.FAILED, operation.reason)
        for request in (SLEEP, WAKE):
            assert (await rig.do(request)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_who_waits_behind_an_operation_in_doubt_gets_a_turn_when_it_is_resolved(rig: Rig) -> None:
    """C1, M6."""

    async def story() -> None:
        silence(rig, 1)
        await rig.coordinator.submit(SLEEP)
        await asyncio.sleep(1.0)
        wish = asking(Kind.SLEEP, tags=("weights",), on_conflict=OnConflict.WAIT)
        waiting = await rig.coordinator.submit(wish)
        await asyncio.sleep(90.0)
        answer_again(rig, 1)
        assert (await rig.coordinator.wait(waiting.id, 200.0)).state is OperationState.SUCCEEDED
        assert rig.parked() == [{"weights"}] * 3

    rig.run(story)


def test_a_rank_that_stays_silent_is_given_up_in_the_end(rig: Rig) -> None:
    """C6, M6: the doubt has an end, too."""

    async def story() -> None:
        silence(rig, 2)
        assert (await rig.do(SLEEP)).state is OperationState.FAILED
        await asyncio.sleep(200.0)
        (view, *_) = await rig.coordinator.models()
        assert view.state is ModelState.FAILED and "rank 2" in view.error
        assert not rig.gate_open()

    rig.run(story)
