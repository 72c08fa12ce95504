"""One operation as a pure state machine: step and signal → step, actions, verdict. No clocks, no I/O.

    preflight → reserve → drain (not wake, unpause) → lock → stage → decide → commit → publish → open → done
        └──────────── withdraw ───────────┘       └── abort → reopen

Ranks' answers are folded into one signal a step (`Gathering`); the table below says what a signal leads to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from torpor.actors.coordinator.gathering import Answer, Gathering, RankSlot
from torpor.actors.coordinator.steps import (
    Cancel,
    Event,
    Expired,
    Failed,
    Gone,
    Replied,
    Settled,
    Step,
    Told,
)
from torpor.actors.messages import (
    Kind,
    OperationRequest,
    OperationState,
    RankOutcome,
    RankStatus,
    Refusal,
    RejectCode,
)


class Signal(StrEnum):
    YES = "yes"  # everyone asked has said yes
    NO = "no"
    LOST = "lost"  # a rank is gone for good
    EXPIRED = "expired"  # the step's time is over, and someone has not answered
    CANCEL = "cancel"
    PLANNED = "planned"  # reserve only: a dry run, or nothing to do
    GO_DRAIN = "go_drain"  # reserve only: a sleep, an update, a pause, a reset
    GO_LOCK = "go_lock"  # reserve only: a wake or an unpause, whose gate is closed already


class Action(StrEnum):
    ASK_STATUS = "ask_status"
    CALL_PREFLIGHT = "call_preflight"
    RESERVE = "reserve"
    CALL_DRAIN = "call_drain"
    TAKE_LOCKS = "take_locks"
    CALL_STAGE = "call_stage"
    WRITE_DECISION = "write_decision"
    CALL_COMMIT = "call_commit"
    CALL_PUBLISH = "call_publish"
    CALL_ABORT = "call_abort"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class To:
    """verdict None leaves it as it was."""

    step: Step
    actions: tuple[Action, ...]
    verdict: OperationState | None = None


_REJECTED, _FAILED, _SUCCEEDED = OperationState.REJECTED, OperationState.FAILED, OperationState.SUCCEEDED
_WITHDRAW = To(Step.WITHDRAW, (Action.CALL_ABORT,), _REJECTED)
_WITHDRAW_FAILED = To(Step.WITHDRAW, (Action.CALL_ABORT,), _FAILED)
_ABORT = To(Step.ABORT, (Action.CALL_ABORT,), _REJECTED)
_ABORT_FAILED = To(Step.ABORT, (Action.CALL_ABORT,), _FAILED)
_END = To(Step.DONE, (Action.FINISH,))
_END_FAILED = To(Step.DONE, (Action.FINISH,), _FAILED)

TABLE: dict[tuple[Step, Signal], To] = {
    (Step.PREFLIGHT, Signal.YES): To(Step.RESERVE, (Action.RESERVE,)),
    (Step.PREFLIGHT, Signal.NO): _WITHDRAW,
    (Step.PREFLIGHT, Signal.EXPIRED): _WITHDRAW,
    (Step.PREFLIGHT, Signal.CANCEL): _WITHDRAW,
    # Nobody may be let in any more, not even until someone else closes the gate.
    (Step.PREFLIGHT, Signal.LOST): _WITHDRAW_FAILED,
    (Step.RESERVE, Signal.PLANNED): To(Step.WITHDRAW, (Action.CALL_ABORT,), _SUCCEEDED),
    (Step.RESERVE, Signal.GO_DRAIN): To(Step.DRAIN, (Action.CALL_DRAIN,)),
    (Step.RESERVE, Signal.GO_LOCK): To(Step.LOCK, (Action.TAKE_LOCKS,)),
    (Step.RESERVE, Signal.NO): _WITHDRAW,
    (Step.RESERVE, Signal.CANCEL): _WITHDRAW,
    (Step.DRAIN, Signal.YES): To(Step.LOCK, (Action.TAKE_LOCKS,)),
    (Step.DRAIN, Signal.NO): _WITHDRAW,
    (Step.DRAIN, Signal.EXPIRED): _WITHDRAW,
    (Step.DRAIN, Signal.CANCEL): _WITHDRAW,
    (Step.DRAIN, Signal.LOST): _WITHDRAW_FAILED,
    (Step.LOCK, Signal.YES): To(Step.STAGE, (Action.CALL_STAGE,)),
    (Step.LOCK, Signal.NO): _WITHDRAW,
    (Step.LOCK, Signal.EXPIRED): _WITHDRAW,
    (Step.LOCK, Signal.CANCEL): _WITHDRAW,
    (Step.STAGE, Signal.YES): To(Step.DECIDE, (Action.WRITE_DECISION,)),
    (Step.STAGE, Signal.NO): _ABORT,
    (Step.STAGE, Signal.CANCEL): _ABORT,
    (Step.STAGE, Signal.LOST): _ABORT_FAILED,
    # Out of time is not a no: the answer may have been lost. Ask once, then decide.
    (Step.STAGE, Signal.EXPIRED): To(Step.DOUBT, (Action.ASK_STATUS,)),
    (Step.DOUBT, Signal.YES): To(Step.DECIDE, (Action.WRITE_DECISION,)),
    (Step.DOUBT, Signal.NO): _ABORT,
    (Step.DOUBT, Signal.EXPIRED): _ABORT,
    (Step.DOUBT, Signal.CANCEL): _ABORT,
    (Step.DOUBT, Signal.LOST): _ABORT_FAILED,
    (Step.DECIDE, Signal.YES): To(Step.COMMIT, (Action.CALL_COMMIT,)),
    (Step.DECIDE, Signal.NO): _ABORT,
    (Step.COMMIT, Signal.YES): To(Step.PUBLISH, (Action.CALL_PUBLISH,)),
    (Step.COMMIT, Signal.LOST): _END_FAILED,
    (Step.COMMIT, Signal.EXPIRED): _END_FAILED,
    (Step.PUBLISH, Signal.YES): To(Step.OPEN, (Action.CALL_PUBLISH,)),
    (Step.PUBLISH, Signal.LOST): _END_FAILED,
    (Step.PUBLISH, Signal.EXPIRED): _END_FAILED,
    (Step.OPEN, Signal.YES): To(Step.DONE, (Action.FINISH,), _SUCCEEDED),
    (Step.OPEN, Signal.LOST): _END_FAILED,
    (Step.OPEN, Signal.EXPIRED): _END_FAILED,
    # Nothing was staged: the plan and the drain's lease end by themselves if a rank does not hear of it.
    (Step.WITHDRAW, Signal.YES): _END,
    (Step.WITHDRAW, Signal.NO): _END,
    (Step.WITHDRAW, Signal.EXPIRED): _END,
    (Step.WITHDRAW, Signal.LOST): To(Step.REOPEN, (Action.CALL_ABORT,), _FAILED),
    # Out of time, something may be staged still: `as before` can't be promised, and the gate stays closed.
    (Step.ABORT, Signal.YES): To(Step.REOPEN, (Action.CALL_ABORT,)),
    (Step.ABORT, Signal.LOST): To(Step.REOPEN, (Action.CALL_ABORT,), _FAILED),
    (Step.ABORT, Signal.EXPIRED): _END_FAILED,
    (Step.REOPEN, Signal.YES): _END,
    (Step.REOPEN, Signal.LOST): _END_FAILED,
    (Step.REOPEN, Signal.EXPIRED): _END_FAILED,
}

_EXPIRED_CODE = {
    Step.PREFLIGHT: RejectCode.STAGE_TIMEOUT,  # silence is unknown, not a failure
    Step.DRAIN: RejectCode.DRAIN_TIMEOUT,
    Step.LOCK: RejectCode.DEVICE_BUSY,
    Step.STAGE: RejectCode.STAGE_TIMEOUT,
    Step.DOUBT: RejectCode.STAGE_TIMEOUT,
}


class Machine:
    """The state of one operation. `handle` takes an event and returns what is to be done now."""

    def __init__(self, operation: str, request: OperationRequest, epoch: int, ranks: int) -> None:
        self.request = request
        self.step = Step.PREFLIGHT
        self.verdict: OperationState | None = None
        self.refusal: Refusal | None = None  # why it was not to be: the first reason
        self.noop = False
        self.decided = False
        self.gathering = Gathering(operation, request.kind, epoch, ranks)

    @property
    def slots(self) -> list[RankSlot]:
        return self.gathering.slots

    @property
    def operation(self) -> str:
        return self.gathering.operation

    @property
    def done(self) -> bool:
        return self.step is Step.DONE

    @property
    def cancellable(self) -> bool:
        return (self.step, Signal.CANCEL) in TABLE

    def begin(self, step: Step = Step.PREFLIGHT, statuses: Sequence[RankStatus] = ()) -> tuple[Action, ...]:
        """Start, or go on after a restart: at `commit` when decided, at `abort` when not.

        statuses: of the ranks that are there; after a restart the others are gone.
        """
        entry = {
            Step.PREFLIGHT: (Action.CALL_PREFLIGHT,),
            Step.COMMIT: (Action.CALL_COMMIT,),
            Step.ABORT: (Action.CALL_ABORT,),
        }
        self.step = step
        self.decided = step is Step.COMMIT
        self.gathering.resume(statuses, lost=step is not Step.PREFLIGHT)
        self.gathering.ask(step)
        if step is Step.ABORT:
            self.verdict = _FAILED if self.gathering.lost else _REJECTED
        return self._pass_over(entry[step])

    def handle(self, event: Event) -> tuple[Action, ...]:
        """Answers of another step, epoch, operation or incarnation change nothing."""
        if event.step is not None and event.step is not self.step:
            return ()
        signal = self._signal(event)
        if signal is None:
            return ()
        to = TABLE.get((self.step, signal))
        if to is None:
            return ()
        self._note_reason(signal)
        self._go(to)
        return self._pass_over(to.actions)

    def _pass_over(self, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        """Steps in which nobody is to be asked: without followers that is a yes, when all are gone they are lost."""
        while not self.done and self.gathering.nobody_to_ask(self.step):
            everybody_gone = all(slot.answer is Answer.LOST for slot in self.slots)
            to = TABLE[self.step, Signal.LOST if everybody_gone else Signal.YES]
            self._go(to)
            actions = to.actions
        return actions

    def _go(self, to: To) -> None:
        self.step = to.step
        self.decided = self.decided or to.step is Step.COMMIT
        if to.verdict is not None:
            self.verdict = to.verdict
        if to.step is Step.DONE:
            if self.noop and self.verdict is _SUCCEEDED:
                self.gathering.mark_all(RankOutcome.COMMITTED)
            return
        self.gathering.ask(to.step, planned=self.verdict is _SUCCEEDED)

    def _signal(self, event: Event) -> Signal | None:
        match event:
            case Cancel():
                return Signal.CANCEL
            case Expired():
                self.gathering.expire()
                return Signal.EXPIRED
            case Settled():
                return self._settled(event)
            case Told():
                self.gathering.told(self.step, event.rank, event.status)
            case Replied():
                self.gathering.replied(self.step, event.rank, event.reply)
            case Failed():
                self.gathering.failed(self.step, event.rank, event.error)
            case Gone():
                self.gathering.gone(event.rank, event.error)
        return self._gathered()

    def _settled(self, event: Settled) -> Signal:
        if event.refusal is not None:
            self.refusal = self.refusal or event.refusal
            return Signal.NO
        if self.step is not Step.RESERVE:
            return Signal.YES
        opens = self.request.kind in (Kind.WAKE, Kind.UNPAUSE)
        changes = self.gathering.anything_closed(self.request.tags) or self.gathering.reload_bytes > 0
        self.noop = opens and not changes
        if self.request.dry_run or self.noop:
            return Signal.PLANNED
        return Signal.GO_LOCK if opens else Signal.GO_DRAIN

    def _gathered(self) -> Signal | None:
        answer = self.gathering.answer(self.step)
        return (
            None
            if answer is None
            else {Answer.YES: Signal.YES, Answer.NO: Signal.NO, Answer.LOST: Signal.LOST}[answer]
        )

    def _note_reason(self, signal: Signal) -> None:
        if self.refusal is not None or signal not in (Signal.NO, Signal.LOST, Signal.EXPIRED, Signal.CANCEL):
            return
        if self.verdict is _SUCCEEDED and signal is not Signal.LOST:
            return  # a plan that some rank keeps ends by itself
        if signal is Signal.CANCEL:
            self.refusal = Refusal(RejectCode.CANCELLED, "cancelled before the decision; nothing was changed")
        elif signal is Signal.EXPIRED:
            if self.step is not Step.STAGE and self.step is not Step.WITHDRAW:
                self.refusal = self._expiry()
        else:
            self.refusal = self.gathering.first_refusal()

    def _expiry(self) -> Refusal:
        code = _EXPIRED_CODE.get(self.step, RejectCode.RANK_FAILED)
        silent = [str(slot.rank) for slot in self.slots if slot.outcome is RankOutcome.UNKNOWN]
        if not silent:
            return Refusal(code, f"{self.step}: out of time; try again, or raise the deadline")
        reason = f"{self.step}: no answer in time from rank {', '.join(silent)}"
        known = next((slot.reason for slot in self.slots if slot.reason), None)
        return Refusal(code, f"{reason} ({known})" if known else reason)
