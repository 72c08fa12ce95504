"""How the front door runs operations: checks, submits, waits, and makes one answer of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torpor.actors.messages import (
    Kind,
    ModelView,
    Operation,
    OperationRequest,
    OperationState,
    RejectCode,
)
from torpor.actors.ports import Control
from torpor.service.auth.guard import caller_of
from torpor.service.bodies import SleepBody, WakeBody, parse, targets, to_request, unknown_model
from torpor.service.dialects.dialect import Dialect, on_conflict_of
from torpor.service.logs import note
from torpor.service.problems import Code, Problem, operation_problem
from torpor.service.tracing import traceparent_of
from torpor.service.wire import operation_json

MAX_PROGRAM = 120  # characters


async def published_models(control: Control) -> list[ModelView]:
    return await control.models(detail=False)


async def run_native(
    control: Control, kind: Kind, request: Request, tree: dict[str, Any] | None, path_model: str | None
) -> Response:
    """POST /sleep, /wake, /models/{m}/sleep, /models/{m}/wake. tree: the body; None where there is none."""
    body = parse(SleepBody if kind is Kind.SLEEP else WakeBody, tree)
    views = await published_models(control)
    chosen, fan_out = targets(body, path_model, [view.name for view in views])
    generation = _generation(request, chosen, views)
    default = on_conflict_of(Dialect.NATIVE, tree)
    requests = [
        _with_headers(request, to_request(kind, name, body, default_conflict=default), generation)
        for name in chosen
    ]
    return await _run_all(control, request, requests, views, fan_out)


async def run_on(control: Control, request: Request, wish: OperationRequest) -> Response:
    """One operation on the model that the path names, with the headers' key and generation."""
    views = await published_models(control)
    if wish.model not in [view.name for view in views]:
        raise unknown_model(wish.model, [view.name for view in views])
    wish = _with_headers(request, wish, _generation(request, [wish.model], views))
    return await _run_all(control, request, [wish], views, fan_out=False)


def _with_headers(request: Request, wish: OperationRequest, generation: int | None) -> OperationRequest:
    """Who asks, and under which key, which is each caller's, kind's and model's own."""
    key = request.headers.get("idempotency-key")
    if key:
        key = f"{caller_of(request).name}:{wish.kind}:{wish.model}:{key}"
    return replace(wish, idempotency_key=key or None, caller=who(request), generation=generation)


async def _run_all(
    control: Control,
    request: Request,
    requests: list[OperationRequest],
    views: list[ModelView],
    fan_out: bool,
) -> Response:
    started = await asyncio.gather(*(submit(control, one, request) for one in requests))
    models = ",".join(one.model for one in started)
    note(request, operation_id=",".join(one.id for one in started), model=models)
    # An operation refused at once has its end already: that is told at once, asynchronous or not.
    if _wants_async(request) and any(one.state is OperationState.RUNNING for one in started):
        return _accepted(started, fan_out)
    finished = await asyncio.gather(*(finish(control, one) for one in started))
    return answer(finished, views, fan_out)


def who(request: Request) -> str:
    """The caller for people, as a hold shows it: its name, its address, and the program that it says it is."""
    program = "".join(one for one in request.headers.get("user-agent", "") if one.isprintable())
    address = request.client.host if request.client is not None else "unknown"
    return f"{caller_of(request).name} at {address}, {program[:MAX_PROGRAM]}".rstrip(", ")


async def submit(control: Control, wish: OperationRequest, request: Request) -> Operation:
    # Shielded: a caller that goes away must not take back what it has asked for (C7).
    return await asyncio.shield(
        asyncio.ensure_future(control.submit(replace(wish, traceparent=traceparent_of(request))))
    )


async def finish(control: Control, operation: Operation) -> Operation:
    return await control.wait(operation.id) if operation.state is OperationState.RUNNING else operation


def answer(finished: list[Operation], views: list[ModelView], fan_out: bool) -> Response:
    """200 with the operation (or all of them), else the gravest end as a problem."""
    problems = [operation_problem(one, known_for(one, views)) for one in finished]
    bad = [problem for problem in problems if problem is not None]
    if not fan_out:
        if bad:
            raise bad[0]
        return JSONResponse(operation_json(finished[0]))
    records = [operation_json(one) for one in finished]
    if not bad:
        return JSONResponse({"operations": records})
    worst = next((problem for problem in bad if problem.status == 500), bad[0])
    detail = f"{len(bad)} of {len(finished)} operations did not succeed; the first: {worst.detail}"
    raise Problem(worst.status, worst.code, detail, hint=worst.hint, operations=records)


def known_for(operation: Operation, views: list[ModelView]) -> Mapping[str, Any]:
    """What there is, for an answer to a name that there is not."""
    if operation.code is RejectCode.UNKNOWN_MODEL:
        return {"known_models": [view.name for view in views]}
    if operation.code is RejectCode.UNKNOWN_TAG:
        return {"known_tags": next((view.tags for view in views if view.name == operation.model), [])}
    return {}


async def find_model(control: Control, name: str) -> ModelView:
    try:
        return await control.model(name)
    except KeyError:
        raise unknown_model(name, [view.name for view in await published_models(control)]) from None


def _generation(request: Request, chosen: list[str], views: list[ModelView]) -> int | None:
    """What If-Match names; None: whichever it is. The coordinator compares once more, when nothing can come between.

    Under an idempotency key only the coordinator does: who asks again for what has been done gets that.
    """
    header = request.headers.get("if-match")
    if header is None:
        return None
    if len(chosen) != 1:
        detail = "If-Match names the generation of one model, and this request means several."
        raise Problem(422, Code.INVALID_FIELD, detail, hint="Name one model, or leave If-Match out.")
    now = next(view.generation for view in views if view.name == chosen[0])
    wanted = header.strip().removeprefix("W/").strip('"')
    if wanted == "*":
        return None
    if not (wanted.isascii() and wanted.isdecimal() and len(wanted) < 19):
        detail = "If-Match names no generation: it takes one number, as in the ETag of a model, or *."
        raise Problem(422, Code.INVALID_FIELD, detail, hint=f"Look at GET /models/{chosen[0]}.")
    known = int(wanted)
    if known != now and "idempotency-key" not in request.headers:
        detail = f"{chosen[0]!r} has generation {now}, not {wanted}: it has changed since you looked."
        hint = f"Look at GET /models/{chosen[0]} and repeat with its generation."
        raise Problem(412, RejectCode.GENERATION, detail, hint=hint, generation=now)
    return known


def _wants_async(request: Request) -> bool:
    wishes = ",".join(request.headers.getlist("prefer")).split(",")
    return any(wish.split(";")[0].strip().lower() == "respond-async" for wish in wishes)


def _accepted(started: list[Operation], fan_out: bool) -> Response:
    headers = {"Preference-Applied": "respond-async"}
    if fan_out:
        return JSONResponse({"operations": [operation_json(one) for one in started]}, 202, headers)
    headers["Location"] = f"/operations/{started[0].id}"
    return JSONResponse(operation_json(started[0]), 202, headers)
