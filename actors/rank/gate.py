"""The door of a model, at its leader rank: who may come in, and when everybody has left.

One mutex decides admissions and drains alike (G1). It is held for a few instructions only: callbacks, waits and
futures are dealt with after it has been let go.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from enum import StrEnum

from torpor.actors.messages import DrainMode, FinishReason, GateReason

Clock = Callable[[], float]


class Emptied(StrEnum):
    """How a drain's wait ended."""

    IDLE = "idle"  # nothing runs any more, or what does will be frozen
    RELEASED = "released"  # the operation was taken back meanwhile
    FAILED = "failed"  # the model failed meanwhile


class NotDrained(Exception):
    """A stage wanted the gate, but it is open, or requests still run."""


class GateFull(Exception):
    """As many requests as the engine may hold are inside."""


class NotIdle(Exception):
    """The gate was to be closed only if nothing ran or waited behind it; it is as before."""


class GateHeld(Exception):
    """Another operation has staged behind this gate and is not decided yet."""


@dataclass(slots=True)
class _Hold:
    """What an operation did to the gate, and how to undo it. before None: the gate was open."""

    operation: str
    before: GateReason | None
    frozen_before: float | None
    emptied: Future[Emptied] | None = None
    lease_ends_at: float | None = None
    staging: bool = False  # from here on no lease and no other operation reopens the gate
    freeze_s: float | None = None  # its stage freezes what is inside, for so long at most
    aborted: int = 0


class Gate:
    """Open, or closed with a reason. Thread-safe.

    Life of an operation: begin_drain → drained → hold_for_stage → staged → settle, or release to undo.

    Frozen requests keep their places inside: from the stage of a freeze until the gate opens nothing runs, although
    there are some.
    """

    def __init__(self, clock: Clock, capacity: int) -> None:
        self._clock = clock
        self._capacity = capacity
        self._lock = threading.Lock()
        self._reason: GateReason | None = GateReason.LOADING
        self._admitted: set[str] = set()
        self._hold: _Hold | None = None
        self._frozen_until: float | None = None  # what is inside stands still; None: it runs

    @property
    def reason(self) -> GateReason | None:
        """Why it is closed; None when open."""
        with self._lock:
            return self._reason

    @property
    def holder(self) -> str | None:
        """The operation that is to settle or to release it."""
        with self._lock:
            return self._hold.operation if self._hold is not None else None

    @property
    def running(self) -> int:
        """Requests admitted and not yet left, frozen ones too."""
        with self._lock:
            return len(self._admitted)

    @property
    def frozen(self) -> int:
        """Of them, those that stand still until the gate opens."""
        with self._lock:
            return len(self._admitted) if self._frozen_until is not None else 0

    def admitted(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._admitted)

    def admit(self, request: str) -> GateReason | None:
        """Let a request in and count it. The reason, where the gate is closed. Raises GateFull."""
        with self._lock:
            if self._reason is None:
                if len(self._admitted) >= self._capacity:
                    raise GateFull(f"{self._capacity} requests run or wait already; try again later")
                self._admitted.add(request)
            return self._reason

    def leave(self, request: str, finish: FinishReason | None) -> None:
        """A request ended; unknown ones are ignored. The last one ends the wait of a drain."""
        with self._lock:
            if request not in self._admitted:
                return
            self._admitted.remove(request)
            hold = self._hold
            if hold is not None and finish is FinishReason.ABORT:
                hold.aborted += 1
            emptied = hold.emptied if hold is not None and not self._admitted else None
        _resolve(emptied, Emptied.IDLE)

    def begin_drain(
        self, operation: str, mode: DrainMode = DrainMode.FINISH, freeze_timeout_s: float | None = None
    ) -> Future[Emptied]:
        """Close for this operation. The future resolves when nothing runs any more. Repeatable.

        A freeze resolves at once; what is frozen already is waited for by an abort only. An operation that was left
        lying in its drain is overtaken. Raises GateHeld where one has staged, and NotIdle for `if_idle` where
        anybody is inside.
        """
        future: Future[Emptied] = Future()
        with self._lock:
            if mode is DrainMode.IF_IDLE and self._admitted:
                raise NotIdle(
                    f"{len(self._admitted)} requests run or wait; ask again when they have ended, "
                    "or drain with mode finish, abort or freeze"
                )
            overtaken = self._hold.emptied if self._hold is not None else None
            hold = self._take(operation)
            hold.emptied, hold.lease_ends_at = future, None
            if mode is DrainMode.FREEZE:
                hold.freeze_s = math.inf if freeze_timeout_s is None else freeze_timeout_s
            if self._reason is not GateReason.FAILED:
                self._reason = GateReason.DRAINING
            stands_still = self._frozen_until is not None and mode is not DrainMode.ABORT
            idle = not self._admitted or mode is DrainMode.FREEZE or stands_still
            failed = self._reason is GateReason.FAILED
        _resolve(overtaken, Emptied.RELEASED)
        if failed or idle:
            _resolve(future, Emptied.FAILED if failed else Emptied.IDLE)
        return future

    def drained(self, operation: str, lease_s: float) -> int:
        """The drain is over: from now the gate reopens after lease_s without a stage. Returns requests aborted."""
        with self._lock:
            hold = self._hold
            if hold is None or hold.operation != operation:
                return 0
            hold.lease_ends_at = self._clock() + lease_s
            return hold.aborted

    def hold_for_stage(self, operation: str, reason: GateReason) -> None:
        """Keep the gate closed for the stage; from now no lease reopens it, and what a freeze found is frozen.

        Raises NotDrained where requests could run: the gate is open (no drain, or its lease has ended);
        GateHeld where another operation has staged.
        """
        with self._lock:
            hold = self._hold
            freezes = hold is not None and hold.operation == operation and hold.freeze_s is not None
            runs = bool(self._admitted) and self._frozen_until is None and not freezes
            if self._reason is None or runs:
                raise NotDrained(
                    "the gate was not drained, or the drain's lease has ended; start the operation again"
                )
            hold = self._take(operation)
            hold.staging, hold.lease_ends_at = True, None
            if hold.freeze_s is not None:
                before = math.inf if self._frozen_until is None else self._frozen_until
                self._frozen_until = min(before, self._clock() + hold.freeze_s)
            if self._reason is not GateReason.FAILED:
                self._reason = reason

    def staged(self, operation: str, lease_s: float) -> None:
        """The stage is done. Without a decision within lease_s the reason becomes `in_doubt`; it never reopens."""
        with self._lock:
            hold = self._hold
            if hold is not None and hold.operation == operation:
                hold.lease_ends_at = self._clock() + lease_s

    def release(self, operation: str) -> None:
        """Undo what this operation did to the gate. Unknown operations are ignored."""
        with self._lock:
            hold = self._hold
            if hold is None or hold.operation != operation:
                return
            self._undo(hold)
        _resolve(hold.emptied, Emptied.RELEASED)

    def settle(self, operation: str, reason: GateReason | None) -> None:
        """The operation is published: None opens, and what was frozen runs. A failed gate stays closed."""
        with self._lock:
            if reason is None:
                self._frozen_until = None
            hold = self._hold
            if hold is not None and hold.operation == operation:
                self._hold = None
            if self._reason is not GateReason.FAILED:
                self._reason = reason

    def open(self) -> None:
        """The end of loading."""
        with self._lock:
            if self._reason is GateReason.LOADING:
                self._reason = None

    def fail(self) -> None:
        """Closed for good: nothing but a new incarnation opens it again."""
        with self._lock:
            self._reason = GateReason.FAILED
            emptied = self._hold.emptied if self._hold is not None else None
        _resolve(emptied, Emptied.FAILED)

    def tick(self) -> None:
        """Look at the leases; to be called every second or so."""
        with self._lock:
            hold = self._hold
            if hold is None or hold.lease_ends_at is None or self._clock() < hold.lease_ends_at:
                return
            if not hold.staging:
                self._undo(hold)
            elif self._reason is not GateReason.FAILED:
                self._reason = GateReason.IN_DOUBT

    def freeze_is_over(self) -> bool:
        """Whether frozen requests have waited for as long as they may; told once."""
        with self._lock:
            if self._frozen_until is None or self._clock() < self._frozen_until or not self._admitted:
                return False
            self._frozen_until = math.inf
            return True

    def _take(self, operation: str) -> _Hold:
        # Under the lock. What an overtaken operation did is undone first.
        hold = self._hold
        if hold is not None and hold.operation != operation:
            if hold.staging:
                raise GateHeld(f"operation {hold.operation} has staged and waits for its decision")
            self._undo(hold)
            hold = None
        if hold is None:
            hold = self._hold = _Hold(operation, self._reason, self._frozen_until)
        return hold

    def _undo(self, hold: _Hold) -> None:
        self._hold = None
        self._frozen_until = hold.frozen_before
        if self._reason is not GateReason.FAILED:
            self._reason = hold.before


def _resolve(future: Future[Emptied] | None, how: Emptied) -> None:
    if future is None:
        return
    # Two threads may come here with the same future, or its waiter may be gone: the first one counts.
    with contextlib.suppress(InvalidStateError):
        future.set_result(how)
