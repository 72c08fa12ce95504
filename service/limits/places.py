"""How many requests may be inside at once, by what they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from torpor.service.auth.access import Call
from torpor.service.limits.bounds import Bounds
from torpor.service.logs import note
from torpor.service.problems import Code, Problem

RETRY_AFTER_S = 1


class Purpose(StrEnum):
    """A request's, named as the bound that it has under `limits`."""

    INFERENCE = "inference_requests"
    CONTROL = "control_requests"
    EVENTS = "event_streams"


def purpose_of(call: Call | None) -> Purpose | None:
    """None: probes are always answered."""
    if call is not None and call.is_open:
        return None
    if call is not None and call.path == "/events":
        return Purpose.EVENTS
    return Purpose.INFERENCE if call is not None and call.is_inference else Purpose.CONTROL


class Places:
    """ASGI, within the guard: a request that finds all places of its purpose taken is refused at once."""

    def __init__(self, app: ASGIApp, bounds: Bounds, refused: Callable[[str], None]) -> None:
        self._app = app
        self._refused = refused
        self._most = {
            Purpose.INFERENCE: bounds.inference_requests,
            Purpose.CONTROL: bounds.control_requests,
            Purpose.EVENTS: bounds.event_streams,
        }
        self._taken: Counter[Purpose] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        purpose = purpose_of(scope["state"]["call"]) if scope["type"] == "http" else None
        if purpose is None:
            await self._app(scope, receive, send)
            return
        if self._taken[purpose] >= self._most[purpose]:
            self._refused(purpose)
            request = Request(scope)
            problem = _all_taken(purpose, self._most[purpose])
            note(request, code=problem.code)
            await problem.response(request.url.path)(scope, receive, send)
            return
        self._taken[purpose] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._taken[purpose] -= 1


def _all_taken(purpose: Purpose, most: int) -> Problem:
    return Problem(
        503,
        Code.OVERLOADED,
        f"This front end has as many requests inside as it may: {most} (limits.{purpose}).",
        hint="Repeat after the time in Retry-After, or at another front end; nothing was begun.",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )
