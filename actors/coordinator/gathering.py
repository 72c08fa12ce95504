"""What the ranks have answered in the current step, and what their answers amount to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from torpor.actors.coordinator.steps import PHASE_OF, RELOAD, Step
from torpor.actors.messages import (
    Kind,
    LedgerPhase,
    PhaseReply,
    RankOutcome,
    RankStatus,
    Refusal,
    RejectCode,
)


class Answer(StrEnum):
    YES = "yes"
    NO = "no"
    LOST = "lost"


@dataclass(slots=True)
class RankSlot:
    """One rank in one operation."""

    rank: int
    status: RankStatus | None = None  # with its answer to the preflight; after a restart, as it was found
    answer: Answer | None = None  # in this step; None = none yet
    outcome: RankOutcome = RankOutcome.PENDING
    reason: str | None = None
    refusals: tuple[Refusal, ...] = ()
    plan: PhaseReply | None = None
    drained: PhaseReply | None = None
    staged: PhaseReply | None = None
    committed: PhaseReply | None = None
    published: RankStatus | None = None  # how it is now that the operation has ended there
    prefix_tokens_lost: int = 0  # as its answers tell, those that say no too; not what is only planned

    @property
    def device_bytes(self) -> int:
        """What it needs of its device: as planned, or as it has said when it found too little."""
        if self.plan is not None:
            return self.plan.device_bytes
        lacking = [one.needed_bytes for one in self.refusals if one.code is RejectCode.DEVICE_MEMORY]
        return max(lacking, default=0)


_OUTCOME = {
    Step.PREFLIGHT: RankOutcome.PREPARED,
    Step.STAGE: RankOutcome.STAGED,
    Step.DOUBT: RankOutcome.STAGED,
    Step.COMMIT: RankOutcome.COMMITTED,
}
_NAMED = (RankOutcome.REFUSED, RankOutcome.FAILED)  # an abort does not hide whose fault it was
# In these a no is not the last word: the rank is asked again until the deadline.
_ALONE = (Step.RESERVE, Step.LOCK, Step.DECIDE)  # the coordinator's own
_INSISTENT = (Step.COMMIT, Step.PUBLISH, Step.OPEN, Step.ABORT, Step.REOPEN)
_UNDOING = (Step.WITHDRAW, Step.ABORT, Step.REOPEN)
_LEADER_ALONE = (Step.DRAIN, Step.OPEN, Step.REOPEN)
_FOLLOWERS = (Step.PUBLISH, Step.ABORT)


class Gathering:
    """Slots by rank, and the answers of the step in hand."""

    def __init__(self, operation: str, kind: Kind, epoch: int, ranks: int) -> None:
        self.operation = operation
        self.kind = kind
        self.epoch = epoch
        self.slots = [RankSlot(rank) for rank in range(ranks)]
        self.targets: list[int] = []
        # Counted as answers come in: to look at all of them at each one would be too much for many ranks.
        self._given: Counter[Answer | None] = Counter()  # of the targets
        self._asked: frozenset[int] = frozenset()
        self.planned = False
        self.lost = False  # some rank is, for good
        self.stays_closed = False  # the leader's gate, whatever is published
        self.mismatch: Refusal | None = None

    def ask(self, step: Step, planned: bool = False) -> None:
        """A new step begins; its targets have not answered. In doubt, what is staged stays answered."""
        self.planned = planned
        self.targets = self._targets(step)
        for slot in self.slots:
            if not (step is Step.DOUBT and slot.answer is Answer.YES):
                slot.answer = Answer.LOST if slot.answer is Answer.LOST else None
        self._asked = frozenset(self.targets)
        self._given = Counter(self.slots[rank].answer for rank in self.targets)

    def _targets(self, step: Step) -> list[int]:
        living = [slot.rank for slot in self.slots if slot.answer is not Answer.LOST]
        if self.stays_closed and step in (Step.PUBLISH, Step.OPEN):
            return living if step is Step.PUBLISH else []
        if step in _LEADER_ALONE:
            return [rank for rank in living if rank == 0]
        if step in _FOLLOWERS:
            return [rank for rank in living if rank != 0]
        return [] if step in _ALONE else living

    def resume(self, statuses: Sequence[RankStatus], lost: bool) -> None:
        """After a restart: who has answered is there; with `lost`, the others are gone."""
        for status in statuses:
            self.slots[status.rank].status = status
        for slot in self.slots:
            if lost and slot.status is None:
                self.gone(slot.rank, f"rank {slot.rank} is gone")

    def _give(self, slot: RankSlot, answer: Answer) -> None:
        if slot.rank in self._asked:
            self._given[slot.answer] -= 1
            self._given[answer] += 1
        slot.answer = answer
        self.lost = self.lost or answer is Answer.LOST

    def nobody_to_ask(self, step: Step) -> bool:
        return step not in _ALONE and not self.targets

    def answered(self, rank: int) -> bool:
        return self.slots[rank].answer is not None

    def pending(self) -> list[int]:
        return [rank for rank in self.targets if self.slots[rank].answer is None]

    def told(self, step: Step, rank: int, status: RankStatus) -> None:
        slot = self.slots[rank]
        if status.rank != rank or slot.answer is not None:
            return
        if slot.status is not None and status.incarnation != slot.status.incarnation:
            self.gone(rank, f"rank {rank} was replaced: it is a new incarnation with nothing in it")
        elif step is Step.DOUBT:
            # Without the digest it is not known whether the ranks go through together (M7).
            staged = status.operation == self.operation and status.ledger_phase is LedgerPhase.STAGED
            if staged and status.staged_digest and slot.plan is not None:
                slot.staged = replace(slot.plan, phase=PHASE_OF[step], digest=status.staged_digest)
                self._yes(step, slot)
            else:
                self._no(
                    slot,
                    RankOutcome.UNKNOWN,
                    (),
                    "did not finish its stage in time",
                    RejectCode.STAGE_TIMEOUT,
                )
        elif step in (Step.COMMIT, Step.PUBLISH, Step.OPEN) and self._is_past(step, status):
            if step is not Step.COMMIT:
                slot.published = status
            self._yes(step, slot)

    def _is_past(self, step: Step, status: RankStatus) -> bool:
        past = (LedgerPhase.IDLE,) if step is not Step.COMMIT else (LedgerPhase.IDLE, LedgerPhase.COMMITTED)
        return status.operation == self.operation and status.ledger_phase in past

    def replied(self, step: Step, rank: int, reply: PhaseReply) -> None:
        slot = self.slots[rank]
        if slot.answer is not None or not self._is_current(step, rank, reply):
            return
        if step is Step.PREFLIGHT:
            slot.status = reply.status
            if reply.status is not None and not reply.status.loaded:
                why = reply.status.error or "it is not loaded"
                self._no(slot, RankOutcome.REFUSED, (), why, RejectCode.WRONG_STATE)
                return
        else:
            slot.prefix_tokens_lost = max(slot.prefix_tokens_lost, reply.prefix_tokens_lost)
        if reply.ok:
            self._keep(step, slot, reply)
            self._yes(step, slot)
        elif step in _INSISTENT:
            slot.reason = reply.refusals[0].reason if reply.refusals else f"{step} did not succeed"
            self._keep(step, slot, reply)
        else:
            if step is Step.DRAIN:
                slot.drained = reply
            code = {Step.DRAIN: RejectCode.DRAIN_TIMEOUT, Step.PREFLIGHT: RejectCode.REFUSED}.get(
                step, RejectCode.RANK_FAILED
            )
            outcome = RankOutcome.FAILED if step is Step.STAGE else RankOutcome.REFUSED
            self._no(slot, outcome, reply.refusals, f"{step} was refused", code)

    def _is_current(self, step: Step, rank: int, reply: PhaseReply) -> bool:
        status = self.slots[rank].status
        if step is Step.PREFLIGHT:
            status = reply.status
            if status is None or status.rank != rank:
                return False
        return (
            reply.operation == self.operation
            and reply.phase is PHASE_OF[step]
            and reply.epoch == self.epoch
            and reply.rank == rank
            and (status is None or reply.incarnation == status.incarnation)
        )

    def _keep(self, step: Step, slot: RankSlot, reply: PhaseReply) -> None:
        match step:
            case Step.PREFLIGHT:
                slot.plan = reply
            case Step.DRAIN:
                slot.drained = reply
            case Step.STAGE | Step.DOUBT:
                slot.staged = reply
            case Step.COMMIT:
                slot.committed = reply
                self.stays_closed = self.stays_closed or (slot.rank == 0 and reply.stays_closed)
            case Step.PUBLISH | Step.OPEN:
                slot.published = reply.status
            case _:
                pass

    def _yes(self, step: Step, slot: RankSlot) -> None:
        self._give(slot, Answer.YES)
        if step in _OUTCOME:
            slot.outcome = _OUTCOME[step]
            slot.reason = None
        elif step in _UNDOING and not self.planned and slot.outcome not in _NAMED:
            slot.outcome = RankOutcome.ABORTED

    def _no(
        self,
        slot: RankSlot,
        outcome: RankOutcome,
        refusals: tuple[Refusal, ...],
        reason: str,
        code: RejectCode,
    ) -> None:
        self._give(slot, Answer.NO)
        slot.outcome = outcome
        slot.refusals = refusals or (Refusal(code, f"rank {slot.rank}: {reason}"),)
        slot.reason = slot.refusals[0].reason

    def failed(self, step: Step, rank: int, error: str) -> None:
        slot = self.slots[rank]
        if slot.answer is not None:
            return
        if step in _INSISTENT:
            slot.reason = error
        elif step is Step.WITHDRAW:
            self._give(slot, Answer.NO)
        else:
            self._no(slot, RankOutcome.FAILED, (), error, RejectCode.RANK_FAILED)

    def gone(self, rank: int, error: str) -> None:
        slot = self.slots[rank]
        self._give(slot, Answer.LOST)
        if slot.outcome is not RankOutcome.COMMITTED:
            slot.outcome = RankOutcome.FAILED
        slot.reason = error
        slot.refusals = (Refusal(RejectCode.RANK_FAILED, f"rank {rank}: {error}; {RELOAD}"),)

    def expire(self) -> None:
        for rank in self.pending():
            self.slots[rank].outcome = RankOutcome.UNKNOWN

    def answer(self, step: Step) -> Answer | None:
        """What all answers amount to; None while someone is still to be heard."""
        given = self._given
        # In a commit also one that was gone before it could be asked.
        lost = bool(given[Answer.LOST]) or (step is Step.COMMIT and self.lost)
        if given[None] and not (step is Step.STAGE and (lost or given[Answer.NO])):
            return None  # only a stage is cut short: it may take a minute
        if lost:
            return Answer.LOST
        if given[Answer.NO]:
            return Answer.NO
        return Answer.NO if self._digests_differ(step) else Answer.YES

    def _digests_differ(self, step: Step) -> bool:
        if step not in (Step.PREFLIGHT, Step.STAGE, Step.DOUBT):
            return False
        replies = [slot.plan if step is Step.PREFLIGHT else slot.staged for slot in self.slots]
        digests = {reply.rank: reply.digest for reply in replies if reply is not None and reply.digest}
        if len(set(digests.values())) <= 1:
            return False
        told = ", ".join(f"rank {rank}: {digest[:12]}" for rank, digest in digests.items())
        self.mismatch = Refusal(RejectCode.DIGEST_MISMATCH, f"the ranks' plans differ ({told}); {RELOAD}")
        return True

    def anything_closed(self, tags: tuple[str, ...] | None) -> bool:
        """Whether a wake of these tags, or an unpause, has anything to open."""
        if self.kind is Kind.UNPAUSE:
            return any(slot.status.paused for slot in self.slots if slot.status)
        parked = {tag for slot in self.slots if slot.status for tag in slot.status.parked_tags}
        return bool(parked if tags is None else parked & set(tags))

    @property
    def reload_bytes(self) -> int:
        """Of weights, that the ranks read from their source in this wake."""
        return sum(slot.plan.reload_bytes for slot in self.slots if slot.plan is not None)

    def first_refusal(self) -> Refusal | None:
        """A lost rank explains more than a refusal that it brought about."""
        if self.mismatch is not None:
            return self.mismatch
        slots = sorted(self.slots, key=lambda slot: slot.answer is not Answer.LOST)
        return next((refusal for slot in slots for refusal in slot.refusals), None)

    def mark_all(self, outcome: RankOutcome) -> None:
        for slot in self.slots:
            slot.outcome = outcome
