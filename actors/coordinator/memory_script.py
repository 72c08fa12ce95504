"""What tests set and script of a rank in this process: its faults, its gate, and calls that wait for a word."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from torpor.actors.messages import GateReason


class Fault(StrEnum):
    REFUSE = "refuse"  # ok False, nothing done
    RAISE = "raise"
    HANG = "hang"  # nothing done, no answer ever
    LOSE = "lose"  # done, but the answer never arrives
    DIE = "die"  # the process is gone before it does anything
    DIE_AFTER = "die_after"  # ... and after it has done it
    STALE = "stale"  # done, but the answer carries another epoch
    OTHER_DIGEST = "other_digest"  # a plan that differs from the others'
    LOSE_OTHER_DIGEST = "lose_other_digest"  # ... and its answer never arrives


@dataclass(slots=True)
class MemoryGate:
    """The leader's door."""

    open: bool = True
    reason: GateReason | None = None
    running: int = 0  # requests; tests set it
    holder: str | None = None  # the operation that closed it
    before: tuple[bool, GateReason | None] = (True, None)  # as the holder found it
    quiet_since_s: float = 0.0  # in the event loop's time; tests set it when they let a request leave

    def close(self, operation: str, reason: GateReason) -> None:
        if self.holder != operation:
            self.put_back(self.holder)
            self.holder, self.before = operation, (self.open, self.reason)
        self._set(False, reason)

    def put_back(self, operation: str | None) -> None:
        """What another operation did is not this one's to undo."""
        if self.holder is not None and self.holder == operation:
            self._set(*self.before)
            self.holder = None

    def settle(self, reason: GateReason | None) -> None:
        self.holder = None
        self._set(reason is None, reason)

    def fail(self) -> None:
        """Closed for good."""
        self.open, self.reason = False, GateReason.FAILED

    def _set(self, is_open: bool, reason: GateReason | None) -> None:
        if self.reason is not GateReason.FAILED:
            self.open, self.reason = is_open, reason


class Held:
    """Calls that wait for a word, and not for a time, which a busy machine may stretch or miss."""

    def __init__(self) -> None:
        self._reached, self._let_go = asyncio.Event(), asyncio.Event()

    async def reached(self, timeout_s: float = 10.0) -> None:
        """Returns when a call has come. TimeoutError: none did."""
        await asyncio.wait_for(self._reached.wait(), timeout_s)

    async def pass_by(self) -> None:
        self._reached.set()
        await self._let_go.wait()

    def let_go(self) -> None:
        """For those who wait and all who come."""
        self._let_go.set()
