"""Drop-in memory calls: release, resume, status. Safe to repeat; they answer once memory is free or back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from torpor.actors.messages import Kind, ModelView, OnConflict, OperationRequest
from torpor.service.bodies import MemoryBody, WakeBody, parse, read_json, targets
from torpor.service.context import context_of
from torpor.service.docs import json_body
from torpor.service.logs import note
from torpor.service.operations import answer, find_model, finish, published_models, submit, who

router = APIRouter(tags=["memory"])
# Tags that any model may have: one that this model lacks has nothing to do, and is no mistake.
COMMON_TAGS = frozenset({"weights", "kv_cache", "cuda_graph", "workspace"})


@router.post("/release_memory", openapi_extra=json_body(MemoryBody))
async def release_memory(request: Request) -> Response:
    """Sleep, by tags."""
    return await _run(Kind.SLEEP, request)


@router.post("/resume_memory", openapi_extra=json_body(MemoryBody))
async def resume_memory(request: Request) -> Response:
    """Wake, by tags."""
    return await _run(Kind.WAKE, request)


@router.get("/memory_status")
async def memory_status(request: Request, model: str | None = None) -> dict[str, Any]:
    """State and parked tags."""
    control = context_of(request).control
    known = [view.name for view in await published_models(control)]
    chosen, _ = targets(WakeBody(model=model), None, known)
    return _status(await find_model(control, chosen[0]))


async def _run(kind: Kind, request: Request) -> Response:
    tree = await read_json(request)
    body = parse(MemoryBody, tree)
    control = context_of(request).control
    views = await published_models(control)
    chosen, _ = targets(WakeBody(model=body.model), None, [view.name for view in views])
    view = next(view for view in views if view.name == chosen[0])
    ignored = sorted(set(tree or {}) - set(MemoryBody.model_fields))
    headers = {"Torpor-Ignored": ", ".join(ignored)} if ignored else {}
    tags = None
    if body.tags is not None:
        tags = tuple(tag for tag in dict.fromkeys(body.tags) if tag in view.tags or tag not in COMMON_TAGS)
        if not tags:
            return JSONResponse(_status(view), headers=headers)
    wish = OperationRequest(
        kind=kind, model=view.name, tags=tags, on_conflict=OnConflict.WAIT, caller=who(request)
    )
    begun = await submit(control, wish)
    note(request, operation_id=begun.id)
    done = await finish(control, begun)
    response = answer([done], views, fan_out=False)
    response.headers.update(headers)
    return response


def _status(view: ModelView) -> dict[str, Any]:
    return {
        "model": view.name,
        "state": view.state,
        "parked_tags": sorted(view.parked_tags),
        "tags": sorted(view.tags),
        "gate": {"open": view.gate_open, "reason": view.gate_reason},
    }
