"""What a request that is not let in is told: a Problem, with Retry-After where it may come again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torpor.actors.messages import GateReason, TokenEvent
from torpor.actors.ports import ContextTooLong, GateClosed, InvalidRequest, QueueFull
from torpor.service.gate.gates import Gates
from torpor.service.gate.policy import NotLetIn
from torpor.service.problems import Code, Problem


class Counts(Protocol):
    def count_admission(self, model: str, result: str, reason: str) -> None: ...

    def count_open(self, model: str, change: int) -> None: ...

    def count_end(self, model: str, last: TokenEvent) -> None: ...


# What ends the wait, as far as a person can do something about it.
_HINTS: Mapping[str, str] = {
    GateReason.ASLEEP: "Wake it with POST /models/{model}/wake.",
    GateReason.CONTENTS_UNDEFINED: "Its weights woke without contents; POST /models/{model}/recover loads them anew.",
    "ending": "Another front end may answer at once.",
    # Also of one whose leader has just died, which comes back by itself.
    GateReason.FAILED: "Look at GET /models/{model}. Where it does not recover by itself, POST /models/{model}/recover "
    "replaces its ranks.",
    GateReason.RECOVERING: "Its ranks are being replaced; repeat after the time in Retry-After.",
    GateReason.IN_DOUBT: "A rank waits for the coordinator's decision; look at GET /models/{model}.",
}


@dataclass(frozen=True, slots=True)
class Admission:
    """Turns a model's refusal into a Problem, and counts."""

    counts: Counts
    gates: Gates

    def admitted(self, model: str) -> None:
        self.counts.count_admission(model, "admitted", "")
        self.counts.count_open(model, 1)

    def left(self, model: str) -> None:
        """An admitted request has ended, and holds nothing any more."""
        self.counts.count_open(model, -1)

    def ended(self, model: str, last: TokenEvent) -> None:
        """With this event; its request may have others beside it."""
        self.counts.count_end(model, last)

    def closed(self, model: str, refusal: GateClosed) -> Problem:
        reason = str(refusal.reason)
        code = Code.GATE_CLOSED
        if isinstance(refusal, NotLetIn):
            code = Code.QUEUE_FULL if refusal.full else Code.QUEUE_TIMEOUT
        self.counts.count_admission(model, "rejected", reason if code is Code.GATE_CLOSED else str(code))
        hint = _HINTS.get(reason, "Repeat after the time in Retry-After.").replace("{model}", model)
        return Problem(
            503,
            code,
            _with_detail(f"{model!r} admits no requests: {reason}", str(refusal)),
            hint=hint,
            headers=self._retry_after(model),
            reason=reason,
            model=model,
        )

    def full(self, model: str, refusal: QueueFull) -> Problem:
        self.counts.count_admission(model, "rejected", "full")
        headers = self._retry_after(model)
        detail = f"{model!r} has its waiting list full: {refusal}" if str(refusal) else f"{model!r} is full."
        return Problem(
            429, Code.QUEUE_FULL, detail, hint="Repeat after the time in Retry-After.", headers=headers
        )

    def _retry_after(self, model: str) -> dict[str, str]:
        return {"Retry-After": str(self.gates.known(model).retry_after_s)}

    def invalid(self, model: str, refusal: InvalidRequest) -> Problem:
        self.counts.count_admission(model, "invalid", "")
        detail = str(refusal) or "The model cannot serve this request."
        if isinstance(refusal, ContextTooLong):
            hint = "Shorten the messages or the prompt, or ask for fewer tokens; nothing was begun."
            return Problem(400, Code.CONTEXT_LENGTH_EXCEEDED, detail, hint=hint)
        return Problem(400, Code.INVALID_REQUEST, detail, hint="Correct it; nothing was begun.")


def _with_detail(text: str, detail: str) -> str:
    """The gate's own words, unless they only repeat the reason."""
    plain = not detail or detail.startswith("the gate is closed")
    return f"{text}." if plain else f"{text} ({detail})."
