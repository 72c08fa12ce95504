"""The events of one request on their way from a leader's stream to whoever reads them."""

from __future__ import annotations

import asyncio

from torpor.actors.messages import TokenEvent
from torpor.actors.rank.events import merged


class Inbox:
    """Holds one event at most: a slow reader finds what came meanwhile merged into it."""

    def __init__(self) -> None:
        self._event: TokenEvent | None = None
        self._lost: Exception | None = None
        self._ready = asyncio.Event()
        self.begun = False  # something was handed to the reader

    def put(self, event: TokenEvent) -> None:
        before = self._event
        self._event = event if before is None else merged(before, event)
        self._ready.set()

    def lose(self, error: Exception) -> None:
        """The leader is gone; `get` raises this once what came before was read."""
        self._lost = error
        self._ready.set()

    async def get(self, patience_s: float | None = None) -> TokenEvent | None:
        """The next event; None: nothing came within patience_s."""
        if not self._ready.is_set():
            try:
                async with asyncio.timeout(patience_s):
                    await self._ready.wait()
            except TimeoutError:
                return None
        event, self._event = self._event, None
        if event is None:
            assert self._lost is not None
            raise self._lost
        if self._lost is None:
            self._ready.clear()
        self.begun = True
        return event
