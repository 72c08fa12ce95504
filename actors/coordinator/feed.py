"""Changes of models and operations, for whoever listens; in bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from torpor.actors.messages import ModelView, Operation

KEPT_CHANGES = 1024


@dataclass(frozen=True, slots=True)
class Change:
    """One of the two is set. reset: changes before this one were missed; read everything anew."""

    epoch: int
    sequence: int
    model: ModelView | None = None
    operation: Operation | None = None
    reset: bool = False


class Feed:
    """Keeps the last changes; a listener that falls behind further than that gets a reset."""

    def __init__(self, kept: int = KEPT_CHANGES) -> None:
        self.epoch = 0
        self._sequence = 0
        self._changes: deque[Change] = deque(maxlen=kept)
        self._news = asyncio.Event()

    def add(self, model: ModelView | None = None, operation: Operation | None = None) -> None:
        self._sequence += 1
        self._changes.append(Change(self.epoch, self._sequence, model, operation))
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self, timeout_s: float) -> None:
        """Until the next change, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    async def listen(self, after: int | None = None) -> AsyncIterator[Change]:
        """Changes after this sequence number; None = from now on. Without end."""
        seen = self._sequence if after is None else after
        while True:
            news = self._news
            waiting = [change for change in self._changes if change.sequence > seen]
            if waiting and waiting[0].sequence > seen + 1:
                yield Change(self.epoch, waiting[0].sequence - 1, reset=True)
            for change in waiting:
                seen = change.sequence
                yield change
            if not waiting:
                await news.wait()
