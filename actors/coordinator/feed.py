"""Changes of models and operations, for whoever follows them; in bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import replace

from torpor.actors.messages import ModelView, Operation
from torpor.actors.news import Change, Changes, Position

KEPT_CHANGES = 1024


def snapshot(operation: Operation) -> Operation:
    """As it is now, with nothing in common that can change: at every phase, so that no deep copy is made of it."""
    return replace(
        operation,
        tags=list(operation.tags),
        restore=dict(operation.restore),
        phases=[replace(phase) for phase in operation.phases],
        ranks=[replace(rank, residual=dict(rank.residual)) for rank in operation.ranks],
        lost_bytes=dict(operation.lost_bytes),
    )


class Feed:
    """Keeps the last changes; whoever asks for older ones, or for another coordinator's, gets a reset."""

    def __init__(self, kept: int = KEPT_CHANGES) -> None:
        self.epoch = 0
        self._sequence = 0
        self._changes: deque[Change] = deque(maxlen=kept)
        self._news = asyncio.Event()

    @property
    def position(self) -> Position:
        return Position(self.epoch, self._sequence)

    def add(
        self, model: ModelView | None = None, operation: Operation | None = None, deleted: str = ""
    ) -> None:
        """As they are now: records of operations go on changing. Each is a change of its own."""
        if operation is not None:
            self._append(operation=snapshot(operation))
        if model is not None:
            self._append(model=model)
        if deleted:
            self._append(deleted=deleted)
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self, timeout_s: float) -> None:
        """Until the next change, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    def since(self, after: Position | None) -> Changes:
        """What has come after that; None = nothing, only where one is now."""
        if after is None or after == self.position:
            return Changes(self.position)
        oldest = self._changes[0].at.sequence if self._changes else self._sequence + 1
        if after.epoch != self.epoch or not oldest - 1 <= after.sequence <= self._sequence:
            return Changes(self.position, (Change(self.position, reset=True),))
        return Changes(self.position, tuple(c for c in self._changes if c.at.sequence > after.sequence))

    async def wait(self, after: Position | None, timeout_s: float) -> Changes:
        """As `since`, once there is something, or the time is over."""
        found = self.since(after)
        if after is not None and not found.changes:
            await self.changed(timeout_s)
            found = self.since(after)
        return found

    def _append(
        self, model: ModelView | None = None, operation: Operation | None = None, deleted: str = ""
    ) -> None:
        self._sequence += 1
        self._changes.append(Change(self.position, model, operation, deleted))
