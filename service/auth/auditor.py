"""Writes every call that changes something into the coordinator's journal, before its answer goes out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from torpor.actors.audit import AuditEntry
from torpor.actors.ports import Control
from torpor.service.auth.access import Call
from torpor.service.problems import Code

_FLOODS = frozenset({Code.TOO_MANY_REQUESTS, Code.OVERLOADED})  # nothing was begun, and they come in masses
_WRITE_S = 5.0  # a coordinator that is away does not keep the answer from its caller for longer


class Auditor:
    """ASGI, around the guard: who was refused for his role is written down, too; who is unknown is not.

    What cannot be written is logged instead.
    """

    def __init__(
        self,
        app: ASGIApp,
        control: Control,
        logger: FilteringBoundLogger,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._app = app
        self._control = control
        self._logger = logger
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        written = False

        async def send_audited(message: Message) -> None:
            nonlocal written
            if message["type"] == "http.response.start" and not written:
                written = True
                await self._write(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_audited)
        except Exception:  # it is answered farther out
            if not written:
                await self._write(scope, 500)
            raise

    async def _write(self, scope: Scope, status: int) -> None:
        state = scope.get("state", {})
        call: Call | None = state.get("call")
        noted = state.get("log_fields", {})
        if call is None or not call.changes or "caller" not in state or noted.get("code") in _FLOODS:
            return
        named = scope.get("path_params", {})
        entry = AuditEntry(
            at=self._clock(),
            caller=state["caller"].name,
            address=scope["client"][0] if scope.get("client") else "",
            call=f"{scope['method']} {call.path}",
            model=noted.get("model") or named.get("model", ""),
            status=status,
            code=noted.get("code", ""),
            operation=noted.get("operation_id") or named.get("operation_id", ""),
            request=state.get("request_id", ""),
        )
        try:
            async with asyncio.timeout(_WRITE_S):
                await self._control.audit(entry)
        except Exception as error:
            self._logger.error("a change is not in the journal's audit", fault=str(error), **asdict(entry))
