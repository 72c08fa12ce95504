"""The spans of one operation: the whole, its phases beneath it, and beneath those each call to a rank."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

from torpor.actors.messages import (
    Operation,
    OperationRequest,
    OperationState,
    PhaseRecord,
    PhaseReply,
    RankStatus,
)
from torpor.actors.ports import RankUnreachable
from torpor.actors.tracing import Mark, begin

UNANSWERED = "unanswered"
A = TypeVar("A", PhaseReply, RankStatus)


class OperationSpans:
    """From its making to `end`; times are those of the operation's record."""

    def __init__(self, operation: Operation, request: OperationRequest) -> None:
        self._kind = operation.kind
        self._whole = begin(f"torpor {operation.kind}", request.traceparent, operation.created_at)
        self._phases: list[tuple[PhaseRecord, Mark]] = []

    def enter(self, phase: PhaseRecord) -> None:
        """Calls to ranks are in this phase from now on."""
        name = f"torpor {self._kind} {phase.name}"
        self._phases.append((phase, begin(name, self._whole.traceparent, phase.started_at)))

    def call(self, rank: int, action: str) -> RankCall:
        """To be entered for the time that the call takes. action: as the machine names it."""
        above = self._phases[-1][1] if self._phases else self._whole
        return RankCall(
            begin(f"torpor {action.replace('_', ' ')}", above.traceparent, attributes={"rank": rank})
        )

    def end(self, operation: Operation) -> None:
        """As the record, which is finished, has it."""
        for phase, mark in self._phases:  # only now they have their bytes
            mark.tell({"bytes": phase.bytes})
            mark.end(phase.started_at + phase.seconds)
        self._phases.clear()
        self._whole.tell(
            {
                "operation": operation.id,
                "model": operation.model,
                "tags": list(operation.tags),
                "origin": str(operation.origin),
                "outcome": str(operation.state),
                "code": str(operation.code or ""),
                "dry_run": operation.dry_run,
            }
        )
        for rank in operation.ranks:
            told: dict[str, str | int] = {
                "rank": rank.rank,
                "node": rank.node,
                "device": rank.device,
                "outcome": str(rank.outcome),
                "freed_bytes": rank.freed_bytes,
                "kept_bytes": rank.kept_bytes,
            }
            self._whole.happened("rank", told)
        if operation.state is not OperationState.SUCCEEDED:
            self._whole.fail(operation.reason or str(operation.state))
        self._whole.end(operation.finished_at)


class RankCall:
    """One call, as the coordinator sees it: with its outcome, or `unanswered` where nothing was heard in time."""

    def __init__(self, mark: Mark) -> None:
        self.traceparent = mark.traceparent
        self._mark = mark
        self._outcome = UNANSWERED

    def heard(self, answer: A) -> A:
        """The same answer."""
        if isinstance(answer, PhaseReply) and not answer.ok:
            self._outcome = "refused"
            self._mark.fail(str(answer.refusals[0].code) if answer.refusals else "")
        else:
            self._outcome = "ok"
        return answer

    def __enter__(self) -> RankCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, Exception):
            self._outcome = "gone" if issubclass(kind, RankUnreachable) else "failed"
        self._mark.tell({"outcome": self._outcome})
        if self._outcome in (UNANSWERED, "gone", "failed"):
            self._mark.fail(self._outcome)
        self._mark.end()
