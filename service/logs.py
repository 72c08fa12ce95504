"""Structured logs, one line an event, to the stream handed in; with the request's and operation's ids."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any, TextIO, cast

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

_QUIET_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})


def make_logger(stream: TextIO, least: int = logging.INFO) -> FilteringBoundLogger:
    """JSON lines when the stream is a pipe or file, columns when it is a terminal. least: the lowest level shown."""
    shown = structlog.dev.ConsoleRenderer() if stream.isatty() else structlog.processors.JSONRenderer()
    logger = structlog.wrap_logger(
        structlog.PrintLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            shown,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
    )
    return cast(FilteringBoundLogger, logger)


def note(request: Request, **fields: str) -> None:
    """More for the line that RequestLog writes at this request's end."""
    request.scope.get("state", {}).get("log_fields", {}).update(fields)


class RequestLog:
    """ASGI: gives every request an id (or takes the caller's X-Request-Id), answers with it, logs its end."""

    def __init__(self, app: ASGIApp, logger: FilteringBoundLogger) -> None:
        self._app = app
        self._logger = logger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = (
            given if given.isascii() and given.isprintable() and 0 < len(given) <= 64 else uuid.uuid4().hex
        )
        started = time.monotonic()
        seen: dict[str, Any] = {"status": None}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
                headers = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        fields: dict[str, Any] = {}
        scope.setdefault("state", {}).update(log_fields=fields, request_id=request_id)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if scope["path"] not in _QUIET_PATHS:
                seconds = round(time.monotonic() - started, 6)
                where = {"method": scope["method"], "path": scope["path"], "seconds": seconds}
                self._logger.info("request", request_id=request_id, status=seen["status"], **where, **fields)
