"""An actor handle of a leader that a test speaks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from torpor.actors.messages import Admission, AdmissionReply, FinishReason, GenerateRequest, TokenEvent

Event = list[TokenEvent]


class Method:
    """As an actor's: `remote` may raise, or give something to await, or a stream."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call

    def options(self, **_: object) -> Method:
        return self


class Leader:
    """An actor handle of a leader that admits everything. What is sent to `events` comes out of its stream."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.silent = False  # answers no submission
        self.broken: Exception | None = None  # every call raises it
        self.submit = Method(self._submit)
        self.cancel = Method(self._cancel)
        self.renew = Method(self._nothing)
        self.detach = Method(self._nothing)
        self.stream = Method(self._stream)

    def say(self, text: str, end: FinishReason | None = None) -> None:
        self.events.put_nowait([TokenEvent(self.submitted[-1], text, finish_reason=end)])

    def _submit(self, front_end: str, requests: list[GenerateRequest]) -> Awaitable[Any]:
        if not self.silent:
            self.submitted += [request.id for request in requests]
        admitted = [AdmissionReply(request.id, Admission.ADMITTED) for request in requests]
        return self._answer(None if self.silent else admitted)

    def _cancel(self, front_end: str, requests: list[str]) -> Awaitable[Any]:
        self.cancelled += requests
        return self._answer([])

    def _nothing(self, *_: object) -> Awaitable[Any]:
        return self._answer([])

    def _answer(self, what: list[Any] | None) -> Awaitable[Any]:
        """None: never."""
        if self.broken is not None:
            raise self.broken
        answer = asyncio.get_running_loop().create_future()
        if what is not None:
            answer.set_result(what)
        return answer

    async def _stream(self, front_end: str) -> AsyncIterator[Awaitable[Event]]:
        while True:
            batch = await self.events.get()
            if isinstance(batch, Exception):
                raise batch

            async def reference(batch: Event = batch) -> Event:
                return batch

            yield reference()
