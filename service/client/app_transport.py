"""The service inside a client's own process: an HTTP transport that runs an ASGI app in an event loop of its thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import httpx
from starlette.types import ASGIApp, Message

T = TypeVar("T")
_END = object()


class AppTransport(httpx.BaseTransport):
    """Whole requests go in; answers are read as they come, so that streams of events are streams here, too.

    peer: what the app sees as the address of its caller. Close it to end the thread.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._app: ASGIApp | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="torpor-app", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the app's event loop; waits for the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def serve(self, app: ASGIApp) -> None:
        """From here on. app: made in this loop, by `run`."""
        self._app = app

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.ReadTimeout where the answer does not begin in time."""
        assert self._app is not None
        silence_s = request.extensions.get("timeout", {}).get("read")
        exchange = _Exchange(self._loop, self._app, _scope(request, self._peer), request.read(), silence_s)
        status, headers = exchange.begin()
        return httpx.Response(status, headers=headers, stream=exchange)

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        if self.closed:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Exchange(httpx.SyncByteStream):
    """One request and its answer, from the loop's thread to the caller's."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        app: ASGIApp,
        scope: dict[str, Any],
        body: bytes,
        silence_s: float | None,
    ) -> None:
        self._loop = loop
        self._body = [body]
        self._silence_s = silence_s
        self._parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._gone = asyncio.Event()
        self._running = asyncio.run_coroutine_threadsafe(self._run(app, scope), loop)

    def begin(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        start = self._next()
        if start is _END:
            raise httpx.RemoteProtocolError("the service ended without an answer")
        return start["status"], list(start.get("headers", []))

    def __iter__(self) -> Iterator[bytes]:
        while (part := self._next()) is not _END:
            yield part["body"]

    def close(self) -> None:
        """As a caller that leaves: what it has begun goes on or ends as it would over a socket."""
        self._loop.call_soon_threadsafe(self._gone.set)

    def _next(self) -> Any:
        try:
            return self._parts.get(timeout=self._silence_s)
        except queue.Empty:
            self.close()
            raise httpx.ReadTimeout(f"nothing came for {self._silence_s} s") from None

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        except (
            Exception
        ):  # the app has answered with a problem, logged it, and raised it on for a server to see
            pass
        finally:
            self._parts.put(_END)

    async def _receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._parts.put(message)
        elif message["type"] == "http.response.body":
            if message.get("body"):
                self._parts.put(message)
            if not message.get("more_body"):
                self._parts.put(_END)


def _scope(request: httpx.Request, peer: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.split(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": (peer, 0),
        "server": (request.url.host, request.url.port),
        "state": {},
    }
