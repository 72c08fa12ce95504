"""Requests on their way to a leader's gate. Those that come together share a call of Ray's: it costs as much for one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from torpor.actors.messages import AdmissionReply, GenerateRequest

MAX_CALLS = 16  # under way at once; who comes then waits for the next
MAX_TOGETHER = 64  # in one call, whose answer waits for the longest of their prompts to be read


@dataclass(slots=True, eq=False)
class _Waiting:
    request: GenerateRequest
    reply: asyncio.Future[AdmissionReply]


class Submissions:
    """In order of their coming. All use is in one event loop."""

    def __init__(self, send: Callable[[Sequence[GenerateRequest]], Awaitable[list[AdmissionReply]]]) -> None:
        """send: one call; it answers in the order of the requests. What it raises, each of them gets."""
        self._send = send
        self._queue: deque[_Waiting] = deque()
        self._under_way: set[_Waiting] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._begins = False
        self._error: Exception | None = None

    async def submit(self, request: GenerateRequest) -> AdmissionReply:
        """Its own answer. Raises what the call or `end` did."""
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop.create_future())
        self._queue.append(waiting)
        if not self._begins:
            self._begins = True
            loop.call_soon(self._begin)  # after all who come in this turn of the loop
        return await waiting.reply

    def end(self, error: Exception) -> None:
        """No answers will come any more: whoever waits, or comes, gets this."""
        self._error = error
        waiting, self._queue = [*self._under_way, *self._queue], deque()
        for each in waiting:
            if not each.reply.done():
                each.reply.set_exception(error)
        for call in self._calls:
            call.cancel()

    def _begin(self) -> None:
        self._begins = False
        while self._queue and len(self._calls) < MAX_CALLS:
            together: list[_Waiting] = []
            while self._queue and len(together) < MAX_TOGETHER:
                each = self._queue.popleft()
                if not each.reply.done():  # else its client has gone
                    together.append(each)
            if together:
                call = asyncio.get_running_loop().create_task(self._call(together))
                self._calls.add(call)
                call.add_done_callback(self._over)

    def _over(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if self._queue:
            self._begin()

    async def _call(self, together: list[_Waiting]) -> None:
        self._under_way.update(together)
        try:
            replies = await self._send([each.request for each in together])
            for each, reply in zip(together, replies, strict=True):
                if not each.reply.done():
                    each.reply.set_result(reply)
        except Exception as error:
            for each in together:
                if not each.reply.done():
                    each.reply.set_exception(error)
        finally:
            self._under_way.difference_update(together)
