"""What is waited for at somebody who may be lost meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Cut(Exception):
    """The line was cut before an answer came; the text says why."""


class Lifeline:
    """Usable from any event loop, one at a time."""

    def __init__(self) -> None:
        self.cut_for = ""  # why; "" while it holds
        self._waiting: set[asyncio.Future[None]] = set()

    def cut(self, why: str) -> None:
        """Whoever waits is told now, whoever comes later at once. The first reason counts."""
        self.cut_for = self.cut_for or why
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def hold(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. Raises Cut, with the work cancelled."""
        if self.cut_for:
            work.close()
            raise Cut(self.cut_for)
        task = asyncio.ensure_future(work)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Cut(self.cut_for)
        finally:
            self._waiting.discard(waiter)
            task.cancel()
