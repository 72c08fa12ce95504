"""The front door and an in-memory cluster in a thread of the test's process, for blocking clients and commands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from service_rig import Rig, make_rig

from torpor.service import Client
from torpor.service.client.app_transport import AppTransport

URL = "http://inside"


@dataclass
class Inside:
    rig: Rig
    transport: AppTransport

    def client(self) -> Client:
        return Client(URL, transport=self.lent(), token="")

    def lent(self) -> httpx.BaseTransport:
        """For a client, which closes what it is given."""
        return _Lent(self.transport)

    def readers(self) -> int:
        """Streams of events that somebody reads."""

        async def count() -> int:
            return sum("_chunks" in str(task) or "changes" in str(task) for task in asyncio.all_tasks())

        return self.transport.run(count())


class _Lent(httpx.BaseTransport):
    def __init__(self, transport: AppTransport) -> None:
        self._transport = transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._transport.handle_request(request)


@contextlib.contextmanager
def inside(folder: Path, models: Mapping[str, int] | None = None, **more: Any) -> Iterator[Inside]:
    """models: ranks by name, one `chat` on one rank by default. more: as of make_rig."""
    transport = AppTransport(peer="test")
    life = contextlib.AsyncExitStack()
    rig = transport.run(life.enter_async_context(make_rig(folder, models or {"chat": 1}, **more)))
    transport.serve(rig.app)
    try:
        yield Inside(rig, transport)
    finally:
        transport.run(life.aclose())
        transport.close()
