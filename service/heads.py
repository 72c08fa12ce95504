"""HEAD: the answer of a GET without its body, for probes and proxies."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Heads:
    """ASGI: asks what is below with GET, and lets it go once it has begun to answer: a stream need not end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        begun = asyncio.Event()

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                begun.set()

        async def ask() -> None:
            await self._app({**scope, "method": "GET"}, receive, send_head)

        asking = asyncio.create_task(ask())
        waiting = asyncio.create_task(begun.wait())
        try:
            await asyncio.wait((asking, waiting), return_when=asyncio.FIRST_COMPLETED)
            if not begun.is_set():
                await asking  # it has failed
        finally:
            for task in (asking, waiting):
                task.cancel()
            await asyncio.gather(asking, waiting, return_exceptions=True)
