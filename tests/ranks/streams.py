"""Generations without end, read as they come, so that a test can see whether they go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ranks.torpors import request, until
from torpor.actors.messages import TokenEvent
from torpor.actors.ports import Inference

ENDLESS = 10_000_000  # tokens


class Generation:
    """One of them. It has not ended as long as `end` is None."""

    def __init__(self, inference: Inference, model: str) -> None:
        self.said = 0
        self.end: TokenEvent | None = None
        self.task = asyncio.create_task(self._read(inference, model))

    async def _read(self, inference: Inference, model: str) -> None:
        async for event in inference.generate(model, request(ENDLESS)):
            self.said += len(event.text)
            if event.finish_reason is not None:
                self.end = event


class Streams:
    """Some generations of one model."""

    def __init__(self, inference: Inference, model: str, count: int) -> None:
        self.all = [Generation(inference, model) for _ in range(count)]

    async def go_on(self, timeout_s: float = 10.0) -> None:
        """Until each has said more than it had when this was called. Fails where one has ended, or says nothing."""
        before = [each.said for each in self.all]

        async def more() -> bool:
            for each in self.all:
                if each.task.done():
                    each.task.result()
                assert each.end is None, f"a stream has ended: {each.end}"
            return all(each.said > said for each, said in zip(self.all, before, strict=True))

        await until(more, bool, timeout_s)

    async def close(self) -> None:
        for each in self.all:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in self.all), return_exceptions=True)


@asynccontextmanager
async def streams_of(inference: Inference, model: str, count: int) -> AsyncIterator[Streams]:
    """They all have said something when the block begins, and are closed after it."""
    streams = Streams(inference, model, count)
    try:
        await streams.go_on()
        yield streams
    finally:
        await streams.close()
