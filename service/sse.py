"""Server-sent events, and work that ends when its client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

ResultT = TypeVar("ResultT")


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


def sse_json(data: object) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`work`'s result; cancelled, and ClientGone raised, when the client leaves first. Read the body first."""
    return await _first(work, request.receive)


async def _first(work: Coroutine[Any, Any, ResultT], receive: Receive) -> ResultT:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, gone):
            one.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `chunks` as text/event-stream; runs `close` at the end, also when the client is lost."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], close: Callable[[], Awaitable[None]], headers: dict[str, str]
    ) -> None:
        self._chunks = chunks
        self._close = close
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _first(self._send(send), receive)
        except (ClientGone, OSError):
            pass
        finally:
            aclose = getattr(self._chunks, "aclose", None)
            if aclose is not None:
                await aclose()
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
