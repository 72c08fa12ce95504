"""The engine requests behind one HTTP request: all are admitted or none, all are closed at the end (G4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress

from torpor.actors.messages import FinishReason, GenerateRequest, TokenEvent
from torpor.actors.ports import GateClosed, Inference, InvalidRequest, QueueFull
from torpor.service.admission import Admission
from torpor.service.problems import Code, Problem

Choice = tuple[int, TokenEvent]


class Generation:
    """`start` admits, `events` yields (choice, event) as they come, `close` aborts what still runs."""

    def __init__(
        self, inference: Inference, admission: Admission, model: str, requests: list[GenerateRequest]
    ) -> None:
        self._admission = admission
        self._model = model
        self._streams = [inference.generate(model, request) for request in requests]
        self._first: list[TokenEvent | None] = []
        self._admitted = 0
        self._pumps: list[asyncio.Future[None]] = []

    async def start(self) -> None:
        """Waits for each request's first event, also a silent one: a stream of it can begin, and be kept alive.

        Raises a Problem, with nothing left running.
        """
        firsts = await self._firsts()
        errors = [first for first in firsts if isinstance(first, BaseException)]
        if errors:
            await self.close()
            raise self._problem(errors[0]) from errors[0]
        self._first = [first for first in firsts if not isinstance(first, BaseException)]
        self._admitted = len(self._streams)
        for _ in self._streams:
            self._admission.admitted(self._model)

    async def _firsts(self) -> list[TokenEvent | BaseException | None]:
        if len(self._streams) > 1:
            firsts = (anext(stream, None) for stream in self._streams)
            return await asyncio.gather(*firsts, return_exceptions=True)
        try:  # nearly every request; without tasks of its own it costs a tenth less
            return [await anext(self._streams[0], None)]
        except Exception as error:
            return [error]

    def _problem(self, error: BaseException) -> BaseException:
        if isinstance(error, GateClosed):
            return self._admission.closed(self._model, error)
        if isinstance(error, QueueFull):
            return self._admission.full(self._model, error)
        if isinstance(error, InvalidRequest):
            return self._admission.invalid(self._model, error)
        return error

    async def events(self) -> AsyncIterator[Choice]:
        """Every choice ends with an event that has a finish_reason; a stream that breaks off, with an error."""
        if len(self._streams) == 1:
            async with aclosing(self._of(0)) as only:
                async for event in only:
                    yield 0, event
            return
        queue: asyncio.Queue[Choice] = asyncio.Queue(maxsize=64)

        async def pump(choice: int) -> None:
            async for event in self._of(choice):
                await queue.put((choice, event))

        self._pumps = [asyncio.ensure_future(pump(choice)) for choice in range(len(self._streams))]
        finished = 0
        while finished < len(self._streams):
            entry = await queue.get()
            finished += entry[1].finish_reason is not None
            yield entry

    async def _of(self, choice: int) -> AsyncGenerator[TokenEvent, None]:
        ended = False
        try:
            event = self._first[choice]
            while event is not None:
                ended = event.finish_reason is not None
                if ended:
                    self._admission.ended(self._model, event)
                if not event.silent:
                    yield event
                event = None if ended else await anext(self._streams[choice], None)
            if not ended:
                yield _broken("the model's stream ended without a finish reason")
        except Exception as error:
            yield _broken(str(error) if isinstance(error, GateClosed) else f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        # Pumps first, and whoever reads `events`: a stream that is being read cannot be closed.
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for stream in self._streams:
            aclose = getattr(stream, "aclose", None)
            if aclose is not None:
                with suppress(Exception):
                    await aclose()
        while self._admitted:
            self._admitted -= 1
            self._admission.left(self._model)


def _broken(detail: str) -> TokenEvent:
    return TokenEvent(request="", finish_reason=FinishReason.ERROR, error=detail)


def generation_problem(event: TokenEvent) -> Problem:
    detail = event.error or "The model stopped with an error."
    return Problem(
        500, Code.GENERATION_FAILED, detail, hint="Repeat the request; look at GET /models for the state."
    )
