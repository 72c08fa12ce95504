"""Asks every request who sends it, and whether he may: in front of all routes, and deny by default."""

from __future__ import annotations

from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from torpor.service.addresses import is_loopback
from torpor.service.auth.access import AccessTable, Call
from torpor.service.auth.roles import ANYBODY, LOCAL, Caller
from torpor.service.limits.rates import Rates
from torpor.service.logs import note
from torpor.service.problems import Code, Problem

_REALM = 'Bearer realm="torpor"'


class Callers(Protocol):
    def find(self, token: str) -> Caller | None: ...


class Guard:
    """ASGI. callers None: there are no tokens, and everybody who reaches the loopback address may do everything."""

    def __init__(
        self, app: ASGIApp, callers: Callers | None, rates: Rates, table: AccessTable | None = None
    ) -> None:
        self._app = app
        self._callers = callers
        self._rates = rates
        self._table = table or AccessTable()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close"})  # there are none, and none may slip by
                return
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            caller = self._let_in(request, scope.setdefault("state", {}))
        except Problem as problem:
            note(request, code=problem.code)
            await problem.response(request.url.path)(scope, receive, send)
            return
        if caller.has_token:
            note(request, caller=caller.name)
        await self._app(scope, receive, send)

    def _let_in(self, request: Request, state: dict[str, Any]) -> Caller:
        """Raises the Problem that the answer is. What is known by then is in `state`, for others who ask."""
        call = state["call"] = self._table.find(request.method, request.scope["path"])
        if call is not None and call.is_open:
            caller = state["caller"] = ANYBODY
            return caller
        address = request.client.host if request.client is not None else "unknown"
        if self._callers is None:
            self._rates.count(f"address {address}")
            _not_from_a_foreign_page(request)
            caller = state["caller"] = LOCAL
            return caller
        try:
            caller = state["caller"] = self._identify(self._callers, request)
        except Problem:
            self._rates.count(f"address {address}")  # guesses come no faster
            raise
        self._rates.count(f"caller {caller.name}")
        if call is None:
            raise _no_such_call(request, self._table.methods(request.scope["path"]))
        if not caller.roles & call.roles:
            note(request, caller=caller.name)
            raise _forbidden(caller, call)
        return caller

    def _identify(self, callers: Callers, request: Request) -> Caller:
        given = request.headers.getlist("authorization")
        if not given:
            raise _unauthenticated("This call wants a token.", _REALM)
        scheme, _, token = given[0].partition(" ")
        if len(given) > 1 or scheme.lower() != "bearer" or not token.strip():
            raise _unauthenticated("The Authorization header is not one `Bearer TOKEN`.", _REALM)
        caller = callers.find(token.strip())
        if caller is None:
            raise _unauthenticated("The token is not known here.", f'{_REALM}, error="invalid_token"')
        return caller


def _not_from_a_foreign_page(request: Request) -> None:
    """A page of the web may not use the browser of somebody who can reach this address. Browsers tell where it is from;
    other programs send no Origin.
    """
    origin = request.headers.get("origin")
    if origin is None or is_loopback(_host_of(origin)):
        return
    detail = (
        "This comes from a web page of another origin, and without tokens it cannot be known who wants it."
    )
    hint = "Call from a program, or give the service a tokens file and the page a token."
    raise Problem(403, Code.FORBIDDEN, detail, hint=hint)


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def caller_of(request: Request) -> Caller:
    """Whom the guard has let in."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def _unauthenticated(detail: str, challenge: str) -> Problem:
    hint = "Send `Authorization: Bearer TOKEN` with a token of the service's tokens file."
    return Problem(401, Code.UNAUTHENTICATED, detail, hint=hint, headers={"WWW-Authenticate": challenge})


def _forbidden(caller: Caller, call: Call) -> Problem:
    wanted = sorted(call.roles)
    detail = f"{caller.name!r} may not {call.method} {call.path}: it wants the role {' or '.join(wanted)}."
    hint = "Use a token with that role, or have it added in the tokens file."
    headers = {"WWW-Authenticate": f'{_REALM}, error="insufficient_scope"'}
    return Problem(403, Code.FORBIDDEN, detail, hint=hint, headers=headers, roles=wanted)


def _no_such_call(request: Request, methods: list[str]) -> Problem:
    """Refused whether there is such a route or not; who it is said to is known by now."""
    detail = f"There is no call {request.method} {request.url.path} that anybody may make."
    hint = "See /docs for what there is."
    if methods:
        headers = {"Allow": ", ".join(methods)}
        return Problem(405, Code.METHOD_NOT_ALLOWED, detail, hint=hint, headers=headers)
    return Problem(404, Code.NO_SUCH_PATH, detail, hint=hint)
