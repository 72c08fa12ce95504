"""What a rank remembers of one operation, so that a repeated message gets the first one's answer."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torpor.actors.messages import OperationRequest, Phase, PhaseReply, Refusal
from torpor.actors.rank.reload import Reload
from torpor.actors.rank.replies import is_noop
from torpor.native import Plan, Stopped

REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class Planned:
    """What an operation would do here."""

    plan: Plan | None  # None: of an update, which the ledger has no part in
    refusals: tuple[Refusal, ...]
    numbers: dict[str, Any] = field(default_factory=dict)  # fields of a PhaseReply
    reload: Reload | None = None


@dataclass(slots=True)
class Transaction:
    """One operation on this rank. plan and reload are of the last plan made: preflight's, then stage's."""

    operation: str
    request: OperationRequest | None = None
    plan: Plan | None = None
    reload: Reload | None = None
    replies: dict[Phase, PhaseReply] = field(default_factory=dict)
    running: dict[Phase, asyncio.Task[PhaseReply]] = field(default_factory=dict)
    aborting: bool = False
    prefix_tokens: int = 0  # just before the stage
    in_ledger: bool = False  # the native stage runs: it can be stopped

    def going_on(self, deadline: float, late: str) -> Callable[[], None]:
        """For long work to call between two pieces: it raises when the stage is to end. late: the time-out's text."""

        def go_on() -> None:
            if self.aborting:
                raise Stopped("the operation was aborted")
            if time.monotonic() > deadline:
                raise TimeoutError(late)

        return go_on

    def said_yes(self, phase: Phase) -> bool:
        reply = self.replies.get(phase)
        return reply is not None and reply.ok

    @property
    def changes_nothing(self) -> bool:
        """A sleep of what is parked, a wake of what is active (C1)."""
        moves = self.request is not None and self.request.kind.moves_memory
        still = self.plan is not None and is_noop(self.plan) and self.reload is None
        return moves and still

    @property
    def is_open(self) -> bool:
        """Staged, and not yet at its end: to be remembered whatever else is asked meanwhile."""
        return self.said_yes(Phase.STAGE) and not self.said_yes(Phase.PUBLISH)


class Transactions:
    """The last few, by operation id."""

    def __init__(self) -> None:
        self._all: OrderedDict[str, Transaction] = OrderedDict()

    def staging(self) -> Transaction | None:
        """The one whose stage runs, or has still to be answered. From any thread."""
        return next((each for each in list(self._all.values()) if Phase.STAGE in each.running), None)

    def staged_digest(self, operation: str | None) -> str:
        """What the stage has answered; empty where there is none, or it does not stand. From any thread."""
        found = self._all.get(operation) if operation is not None else None
        reply = found.replies.get(Phase.STAGE) if found is not None else None
        return reply.digest if reply is not None and reply.ok else ""

    def get(self, operation: str) -> Transaction:
        """The operation's record; a new one where it was never heard of."""
        found = self._all.setdefault(operation, Transaction(operation))
        self._all.move_to_end(operation)
        over = len(self._all) - REMEMBERED
        for stale in [each for each in self._all.values() if not (each.is_open or each.running)][
            : max(0, over)
        ]:
            del self._all[stale.operation]
        return self._all.setdefault(operation, found)
