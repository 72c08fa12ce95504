"""First come, first served, where what comes before the counter may take long and overlap."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Place:
    """One in the line. `turn` waits until all before it have left; `leave` must follow, whatever happens."""

    def __init__(self, before: asyncio.Future[None] | None) -> None:
        self._before = before
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def turn(self) -> None:
        if self._before is not None:
            await asyncio.wait((self._before,))

    def leave(self) -> None:
        """Who leaves before its turn lets nobody overtake those before it."""
        if self._before is None or self._before.done():
            self._go()
        else:
            self._before.add_done_callback(lambda _: self._go())

    def _go(self) -> None:
        self._before = None
        with suppress(asyncio.InvalidStateError):
            self.gone.set_result(None)


class Line:
    """All use is in one event loop."""

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None

    def join(self) -> Place:
        before = self._last if self._last is not None and not self._last.done() else None
        place = Place(before)
        self._last = place.gone
        return place
