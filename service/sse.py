"""Server-sent events, and work that ends when its client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
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
SSE_KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients pass over it


async def while_connected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`work`'s result; cancelled, and ClientGone raised, when the client leaves first. Read the body first."""
    return await _first(work, request.receive)


async def _first(work: Coroutine[Any, Any, ResultT], receive: Receive) -> ResultT:
    """In the task of whoever calls, which a watcher interrupts: a task for the work would cost each request more."""
    task, gone = asyncio.current_task(), False
    assert task is not None
    cancelled_by_others = task.cancelling()

    async def watch() -> None:
        nonlocal gone
        await _disconnected(receive)
        gone = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.cancelling() == cancelled_by_others + 1:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
        if gone:
            task.uncancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `chunks` as text/event-stream; runs `close` at the end, also when the client is lost.

    keep_alive_s: a stream that is silent for so long, e.g. of a frozen request, gets a comment: whatever stands
    between it and its client would take it for dead.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        headers: dict[str, str],
        keep_alive_s: float,
    ) -> None:
        self._chunks = chunks
        self._keep_alive_s = keep_alive_s
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
        # Closed by us, not by the collector: what it still reads would keep `chunks` from being closed.
        async with aclosing(_with_keep_alive(self._chunks, self._keep_alive_s)) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_keep_alive(chunks: AsyncIterator[bytes], silence_s: float) -> AsyncGenerator[bytes, None]:
    while True:
        coming = asyncio.ensure_future(anext(chunks, None))
        try:
            while not (await asyncio.wait((coming,), timeout=silence_s))[0]:
                yield SSE_KEEP_ALIVE
        finally:
            if not coming.done():  # nobody reads any more; what is being read cannot be closed
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
        chunk = coming.result()
        if chunk is None:
            return
        yield chunk
