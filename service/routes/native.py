"""The native surface: sleep, wake, models, operations."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from torpor.actors.messages import Kind, Operation
from torpor.actors.ports import Control, NoLease
from torpor.service.bodies import SleepBody, WakeBody, read_json, unknown_model
from torpor.service.context import context_of
from torpor.service.dialects.bodies import query_parameters
from torpor.service.dialects.carrying import query_of
from torpor.service.dialects.dialect import Dialect, dialect_of
from torpor.service.dialects.naming import url_model
from torpor.service.docs import json_body
from torpor.service.logs import note
from torpor.service.operations import find_model, published_models, run_native
from torpor.service.problems import Code, Problem
from torpor.service.routes.vllm import sleep_as
from torpor.service.wire import model_json, operation_json

router = APIRouter(tags=["native"])


@router.post(
    "/sleep", openapi_extra=query_parameters("level", "mode", "tags", "model", "id") | json_body(SleepBody)
)
async def sleep(request: Request) -> Response:
    """Give memory back. `model` may be left out when there is one; several names or "*" fan out.

    With `level` or `mode`, or with `tags` in the query, it is vLLM's call, with `options` Ray Serve LLM's.
    """
    tree = await read_json(request)
    dialect = dialect_of(query_of(request), tree)
    if dialect is not Dialect.NATIVE:
        return await sleep_as(request, dialect, tree)
    named = url_model(request, SleepBody)
    return await run_native(context_of(request).control, Kind.SLEEP, request, tree, named)


@router.post("/models/{model}/sleep", openapi_extra=json_body(SleepBody))
async def sleep_model(model: str, request: Request) -> Response:
    """Give the memory of one model back."""
    tree = await read_json(request)
    named = url_model(request, SleepBody, model)
    return await run_native(context_of(request).control, Kind.SLEEP, request, tree, named)


@router.post("/wake", openapi_extra=json_body(WakeBody))
async def wake(request: Request) -> Response:
    """Take memory again."""
    tree = await read_json(request)
    named = url_model(request, WakeBody)
    return await run_native(context_of(request).control, Kind.WAKE, request, tree, named)


@router.post("/models/{model}/wake", openapi_extra=json_body(WakeBody))
async def wake_model(model: str, request: Request) -> Response:
    """Take the memory of one model again."""
    tree = await read_json(request)
    named = url_model(request, WakeBody, model)
    return await run_native(context_of(request).control, Kind.WAKE, request, tree, named)


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    """Every model with its ranks, their memory by tag and tier, and what the driver sees as free."""
    views = await context_of(request).control.models(detail=True)
    return {"models": [model_json(view) for view in views]}


@router.get("/models/{model}")
async def model(model: str, request: Request) -> JSONResponse:
    """One model; its generation is also the ETag, for If-Match."""
    view = await find_model(context_of(request).control, model)
    return JSONResponse(model_json(view), headers={"ETag": f'"{view.generation}"'})


@router.get("/operations")
async def operations(
    request: Request, model: str | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> dict[str, Any]:
    """Operations, newest first."""
    control = context_of(request).control
    if model is not None:
        known = [view.name for view in await published_models(control)]
        if model not in known:
            raise unknown_model(model, known)
    return {"operations": [operation_json(one) for one in await control.operations(model, limit)]}


@router.get("/operations/{operation_id}")
async def operation(operation_id: str, request: Request) -> dict[str, Any]:
    """One operation, running or finished."""
    return operation_json(await _find(context_of(request).control, operation_id))


@router.post("/operations/{operation_id}/cancel")
async def cancel(operation_id: str, request: Request) -> dict[str, Any]:
    """Cancel it. Works until it is decided; it then ends as rejected, reason cancelled."""
    control = context_of(request).control
    note(request, model=(await _find(control, operation_id)).model)
    if not await control.cancel(operation_id):
        now = await _find(control, operation_id)
        detail = (
            f"Operation {operation_id} cannot be cancelled any more: it is decided or finished ({now.state})."
        )
        hint = f"Look at GET /operations/{operation_id} for its end."
        raise Problem(409, Code.OPERATION_FINISHED, detail, hint=hint, operation_id=operation_id)
    return operation_json(await control.wait(operation_id))


@router.post("/operations/{operation_id}/renew")
async def renew(operation_id: str, request: Request) -> dict[str, Any]:
    """Renew the lease of the hold that this sleep is; the answer is the hold, with its new end."""
    control = context_of(request).control
    found = await _find(control, operation_id)
    note(request, model=found.model)
    try:
        return {"model": found.model, **dataclasses.asdict(await control.renew(operation_id))}
    except NoLease as error:
        hint = f"Look at GET /models/{found.model} for its holds."
        raise Problem(409, Code.NO_LEASE, str(error), hint=hint, operation_id=operation_id) from None


async def _find(control: Control, operation_id: str) -> Operation:
    try:
        return await control.operation(operation_id)
    except KeyError:
        detail = f"There is no operation {operation_id!r}."
        raise Problem(404, Code.UNKNOWN_OPERATION, detail, hint="GET /operations lists them.") from None
