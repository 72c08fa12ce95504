"""The table of transitions, read as data and walked."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from torpor.actors.coordinator.machine import TABLE, Action, Machine, Signal
from torpor.actors.coordinator.steps import Cancel, Expired, Failed, Gone, Replied, Settled, Step, Told
from torpor.actors.messages import (
    Kind,
    LedgerPhase,
    OperationRequest,
    OperationState,
    Phase,
    PhaseReply,
    RankOutcome,
    RankStatus,
    Refusal,
    RejectCode,
)

DECIDED = {Step.COMMIT, Step.PUBLISH, Step.OPEN}
UNDOING = {Step.WITHDRAW, Step.ABORT, Step.REOPEN}
# What can't happen in a step, and why the table has no row for it.
IMPOSSIBLE = (
    {(Step.DONE, signal) for signal in Signal}
    | {(step, Signal.PLANNED) for step in Step if step is not Step.RESERVE}
    | {(step, Signal.GO_DRAIN) for step in Step if step is not Step.RESERVE}
    | {(step, Signal.GO_LOCK) for step in Step if step is not Step.RESERVE}
    | {(step, Signal.CANCEL) for step in (*DECIDED, *UNDOING, Step.DECIDE)}  # refused: too late
    | {
        (step, Signal.NO) for step in (*DECIDED, Step.ABORT, Step.REOPEN)
    }  # a no is asked again until the deadline
    | {(step, Signal.LOST) for step in (Step.RESERVE, Step.LOCK, Step.DECIDE)}  # no rank is asked
    | {
        (step, Signal.EXPIRED) for step in (Step.RESERVE, Step.DECIDE)
    }  # without a deadline: the coordinator's own
    | {(Step.RESERVE, Signal.YES)}  # it says where to go
)


@pytest.mark.parametrize(("step", "signal"), list(itertools.product(Step, Signal)))
def test_every_step_and_signal_is_either_in_the_table_or_impossible(step: Step, signal: Signal) -> None:
    assert ((step, signal) in TABLE) is not ((step, signal) in IMPOSSIBLE)


def test_only_a_written_decision_leads_to_a_commit() -> None:
    into_commit = {key for key, to in TABLE.items() if to.step is Step.COMMIT}
    assert into_commit == {(Step.DECIDE, Signal.YES)}


def test_nothing_is_undone_after_the_decision() -> None:
    for (step, _), to in TABLE.items():
        if step in DECIDED:
            assert to.step not in UNDOING and Action.CALL_ABORT not in to.actions
            assert to.verdict is not OperationState.REJECTED


def test_what_may_be_staged_is_aborted_and_never_just_withdrawn() -> None:
    for (step, _), to in TABLE.items():
        if step in (Step.STAGE, Step.DOUBT, Step.DECIDE):
            assert to.step is not Step.WITHDRAW and to.step is not Step.DONE


def test_every_step_comes_to_an_end() -> None:
    ends = {Step.DONE}
    for _ in Step:
        ends |= {step for (step, _), to in TABLE.items() if to.step in ends}
    assert ends == set(Step)


def test_an_end_always_has_a_verdict() -> None:
    for (step, _), to in TABLE.items():
        if to.step is Step.DONE and to.verdict is None:
            assert step in UNDOING, "only undoing keeps the verdict that led to it"
        if to.step in UNDOING:
            assert to.verdict is not None or step in UNDOING


# --- walked by hand ---


def status(rank: int, incarnation: str = "one", **fields: object) -> RankStatus:
    base: dict[str, object] = {
        "model": "chat",
        "rank": rank,
        "incarnation": incarnation,
        "node": "n",
        "pid": 1,
        "epoch": 7,
        "loaded": True,
        "ledger_phase": LedgerPhase.IDLE,
        "operation": None,
        "kind": None,
        "tags": ("weights",),
        "parked_tags": (),
        "undefined_tags": (),
        "device_kind": "host",
        "device_id": f"d{rank}",
        "device_free_bytes": 100,
        "device_total_bytes": 100,
    }
    return RankStatus(**{**base, **fields})  # type: ignore[arg-type]


def reply(rank: int, phase: Phase, ok: bool = True, **fields: object) -> PhaseReply:
    base: dict[str, object] = {
        "operation": "op",
        "phase": phase,
        "epoch": 7,
        "rank": rank,
        "incarnation": "one",
        "ok": ok,
        "digest": "same",
    }
    return PhaseReply(**{**base, **fields})  # type: ignore[arg-type]


def planned(rank: int, **fields: object) -> PhaseReply:
    return reply(rank, Phase.PREFLIGHT, **{"status": status(rank), **fields})  # type: ignore[arg-type]


def staging(ranks: int = 2) -> Machine:
    """A sleep whose ranks are being asked to stage."""
    machine = Machine("op", OperationRequest(Kind.SLEEP, "chat"), 7, ranks)
    assert machine.begin() == (Action.CALL_PREFLIGHT,)
    for rank in range(ranks):
        machine.handle(Replied(Step.PREFLIGHT, rank, planned(rank)))
    machine.handle(Settled(Step.RESERVE))
    machine.handle(Replied(Step.DRAIN, 0, reply(0, Phase.DRAIN)))
    assert machine.handle(Settled(Step.LOCK)) == (Action.CALL_STAGE,)
    return machine


def committing(ranks: int = 2) -> Machine:
    machine = staging(ranks)
    for rank in range(ranks):
        machine.handle(Replied(Step.STAGE, rank, reply(rank, Phase.STAGE)))
    assert machine.handle(Settled(Step.DECIDE)) == (Action.CALL_COMMIT,)
    return machine


@pytest.mark.parametrize(
    "stale",
    [
        {"operation": "another"},
        {"phase": Phase.PREFLIGHT},
        {"epoch": 6},
        {"incarnation": "two"},
        {"rank": 0},
    ],
)
def test_stale_replies_are_dropped(stale: dict[str, object]) -> None:
    """F7."""
    machine = staging()
    machine.handle(Replied(Step.STAGE, 0, reply(0, Phase.STAGE)))
    wrong = replace(reply(1, Phase.STAGE), **stale)  # type: ignore[arg-type]
    assert machine.handle(Replied(Step.STAGE, 1, wrong)) == ()
    assert machine.step is Step.STAGE
    assert machine.handle(Replied(Step.STAGE, 1, reply(1, Phase.STAGE))) == (Action.WRITE_DECISION,)


def test_answers_of_an_earlier_step_are_dropped() -> None:
    """F7: rank 1 fails late, when the operation is elsewhere already."""
    machine = committing()
    assert machine.handle(Failed(Step.STAGE, 1, "late")) == ()
    assert machine.handle(Expired(Step.STAGE)) == ()
    assert machine.step is Step.COMMIT and machine.slots[1].outcome is RankOutcome.STAGED


def test_a_doubled_answer_counts_once() -> None:
    machine = staging()
    assert machine.handle(Replied(Step.STAGE, 0, reply(0, Phase.STAGE))) == ()
    assert machine.handle(Replied(Step.STAGE, 0, reply(0, Phase.STAGE))) == ()
    assert machine.step is Step.STAGE


def test_a_stage_that_fails_is_aborted_without_waiting_for_the_others() -> None:
    machine = staging(3)
    assert machine.handle(Failed(Step.STAGE, 1, "boom")) == (Action.CALL_ABORT,)
    assert machine.refusal == Refusal(RejectCode.RANK_FAILED, "rank 1: boom")


def test_a_stage_without_an_answer_is_asked_for_and_counts_when_it_is_staged() -> None:
    machine = staging()
    machine.handle(Replied(Step.STAGE, 0, reply(0, Phase.STAGE)))
    assert machine.handle(Expired(Step.STAGE)) == (Action.ASK_STATUS,)
    assert machine.gathering.pending() == [1]
    digest = reply(1, Phase.STAGE).digest
    staged = status(1, operation="op", ledger_phase=LedgerPhase.STAGED, staged_digest=digest)
    assert machine.handle(Told(Step.DOUBT, 1, staged)) == (Action.WRITE_DECISION,)


@pytest.mark.parametrize("digest", ["another", ""])
def test_a_stage_without_an_answer_does_not_count_when_its_digest_is_another_or_not_told(digest: str) -> None:
    """M7."""
    machine = staging()
    machine.handle(Replied(Step.STAGE, 0, reply(0, Phase.STAGE)))
    machine.handle(Expired(Step.STAGE))
    staged = status(1, operation="op", ledger_phase=LedgerPhase.STAGED, staged_digest=digest)
    assert machine.handle(Told(Step.DOUBT, 1, staged)) == (Action.CALL_ABORT,)


def test_a_stage_that_is_not_done_in_time_is_aborted() -> None:
    machine = staging()
    machine.handle(Replied(Step.STAGE, 0, reply(0, Phase.STAGE)))
    machine.handle(Expired(Step.STAGE))
    assert machine.handle(Told(Step.DOUBT, 1, status(1))) == (Action.CALL_ABORT,)
    assert machine.refusal is not None and machine.refusal.code is RejectCode.STAGE_TIMEOUT


def test_the_gate_reopens_only_after_all_followers_have_aborted() -> None:
    machine = staging(3)
    machine.handle(Failed(Step.STAGE, 0, "boom"))
    assert (machine.step, machine.gathering.pending()) == (Step.ABORT, [1, 2])
    machine.handle(Replied(Step.ABORT, 1, reply(1, Phase.STAGE)))
    assert machine.handle(Replied(Step.ABORT, 2, reply(2, Phase.STAGE))) == (Action.CALL_ABORT,)
    assert (machine.step, machine.gathering.pending()) == (Step.REOPEN, [0])
    assert machine.handle(Replied(Step.REOPEN, 0, reply(0, Phase.STAGE))) == (Action.FINISH,)
    assert machine.verdict is OperationState.REJECTED


def test_the_gate_stays_closed_when_a_follower_may_be_staged_still() -> None:
    machine = staging(3)
    machine.handle(Failed(Step.STAGE, 0, "boom"))
    machine.handle(Replied(Step.ABORT, 1, reply(1, Phase.STAGE)))
    assert machine.handle(Expired(Step.ABORT)) == (Action.FINISH,)
    assert machine.verdict is OperationState.FAILED


def test_stages_of_different_plans_are_found_before_the_decision() -> None:
    """M7."""
    machine = staging()
    machine.handle(Replied(Step.STAGE, 0, reply(0, Phase.STAGE)))
    assert machine.handle(Replied(Step.STAGE, 1, reply(1, Phase.STAGE, digest="other"))) == (
        Action.CALL_ABORT,
    )
    assert machine.refusal is not None and machine.refusal.code is RejectCode.DIGEST_MISMATCH


def test_a_commit_that_says_no_is_not_over() -> None:
    machine = committing()
    machine.handle(Replied(Step.COMMIT, 0, reply(0, Phase.COMMIT)))
    assert machine.handle(Replied(Step.COMMIT, 1, reply(1, Phase.COMMIT, ok=False))) == ()
    assert machine.handle(Failed(Step.COMMIT, 1, "busy")) == ()
    assert machine.gathering.pending() == [1] and not machine.cancellable
    assert machine.handle(Cancel()) == ()
    assert machine.handle(Replied(Step.COMMIT, 1, reply(1, Phase.COMMIT))) == (Action.CALL_PUBLISH,)


def test_a_rank_lost_in_commit_fails_the_operation_after_the_others_have_committed() -> None:
    machine = committing(3)
    assert machine.handle(Gone(Step.COMMIT, 1, "gone")) == ()
    machine.handle(Replied(Step.COMMIT, 0, reply(0, Phase.COMMIT, freed_bytes=5)))
    assert machine.handle(Replied(Step.COMMIT, 2, reply(2, Phase.COMMIT, freed_bytes=5))) == (Action.FINISH,)
    assert machine.verdict is OperationState.FAILED
    outcomes = [slot.outcome for slot in machine.slots]
    assert outcomes == [RankOutcome.COMMITTED, RankOutcome.FAILED, RankOutcome.COMMITTED]


def test_a_rank_that_was_replaced_is_lost() -> None:
    machine = staging()
    machine.handle(Replied(Step.STAGE, 0, reply(0, Phase.STAGE)))
    machine.handle(Expired(Step.STAGE))
    machine.handle(Told(Step.DOUBT, 1, status(1, incarnation="two")))
    assert machine.step is Step.REOPEN and machine.verdict is OperationState.FAILED, (
        "no follower is left to abort"
    )


def test_a_single_rank_has_no_followers_to_publish_to() -> None:
    machine = committing(1)
    assert machine.handle(Replied(Step.COMMIT, 0, reply(0, Phase.COMMIT))) == (Action.CALL_PUBLISH,)
    assert machine.step is Step.OPEN
    assert machine.handle(Replied(Step.OPEN, 0, reply(0, Phase.PUBLISH))) == (Action.FINISH,)
    assert machine.verdict is OperationState.SUCCEEDED


def test_all_ranks_publish_at_once_only_where_the_leader_says_that_its_gate_stays_closed() -> None:
    for closed in ((), (0,), (1,), (0, 1)):
        machine = committing(2)
        for rank in range(2):
            told = reply(rank, Phase.COMMIT, stays_closed=rank in closed)
            machine.handle(Replied(Step.COMMIT, rank, told))
        assert machine.gathering.pending() == ([0, 1] if 0 in closed else [1])
        assert machine.handle(Replied(Step.PUBLISH, 1, reply(1, Phase.PUBLISH))) == (
            () if 0 in closed else (Action.CALL_PUBLISH,)
        )
        last = Step.PUBLISH if 0 in closed else Step.OPEN
        assert machine.handle(Replied(last, 0, reply(0, Phase.PUBLISH))) == (Action.FINISH,)
        assert machine.verdict is OperationState.SUCCEEDED


def test_a_commit_that_was_told_by_status_lets_the_leader_publish_last() -> None:
    """Nothing says then that its gate stays closed."""
    machine = committing(2)
    machine.handle(Replied(Step.COMMIT, 1, reply(1, Phase.COMMIT, stays_closed=True)))
    machine.handle(Told(Step.COMMIT, 0, status(0, operation="op", ledger_phase=LedgerPhase.COMMITTED)))
    assert machine.gathering.pending() == [1]


@pytest.mark.parametrize(
    "told",
    [None, status(1, incarnation="two"), status(0)],
    ids=["none", "another incarnation's", "another's"],
)
def test_a_plan_without_the_status_of_whoever_made_it_is_dropped(told: RankStatus | None) -> None:
    machine = Machine("op", OperationRequest(Kind.SLEEP, "chat"), 7, 2)
    machine.begin()
    machine.handle(Replied(Step.PREFLIGHT, 0, planned(0)))
    assert machine.handle(Replied(Step.PREFLIGHT, 1, planned(1, status=told))) == ()
    assert machine.slots[1].status is None and machine.slots[1].plan is None
    assert machine.handle(Replied(Step.PREFLIGHT, 1, planned(1))) == (Action.RESERVE,)


def test_a_rank_that_is_not_loaded_has_no_plan_whatever_it_says() -> None:
    machine = Machine("op", OperationRequest(Kind.SLEEP, "chat"), 7, 1)
    machine.begin()
    machine.handle(Replied(Step.PREFLIGHT, 0, planned(0, status=status(0, loaded=False))))
    assert machine.refusal is not None and machine.refusal.code is RejectCode.WRONG_STATE


@pytest.mark.parametrize("step", [Step.COMMIT, Step.ABORT])
def test_going_on_without_any_rank_ends_at_once(step: Step) -> None:
    machine = Machine("op", OperationRequest(Kind.SLEEP, "chat"), 7, 2)
    assert machine.begin(step) == (Action.FINISH,)
    assert machine.verdict is OperationState.FAILED
