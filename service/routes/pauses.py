"""Natively paused: nobody is let in, and no memory is touched."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from torpor.actors.messages import DrainMode, DrainSpec, Kind, OnConflict, OperationRequest
from torpor.service.bodies import DrainBody, Seconds, parse, read_json
from torpor.service.context import context_of
from torpor.service.dialects.dialect import Dialect, on_conflict_of
from torpor.service.docs import json_body
from torpor.service.operations import run_on

router = APIRouter(tags=["native"])


class UnpauseBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    on_conflict: Literal["reject", "wait"] | None = None
    timeout_s: Seconds | None = None


class PauseBody(UnpauseBody):
    """drain: what becomes of requests that run; with freeze they stand still until the unpause."""

    drain: DrainBody = Field(default_factory=DrainBody)


@router.post("/models/{model}/pause", openapi_extra=json_body(PauseBody))
async def pause(model: str, request: Request) -> Response:
    """Let nobody in, until an unpause; sleeps and wakes in between change nothing about it."""
    tree = await read_json(request)
    body = parse(PauseBody, tree)
    drain = DrainSpec(DrainMode(body.drain.mode), body.drain.timeout_s, body.drain.freeze_timeout_s)
    return await _run(Kind.PAUSE, model, request, body, on_conflict_of(Dialect.NATIVE, tree), drain)


@router.post("/models/{model}/unpause", openapi_extra=json_body(UnpauseBody))
async def unpause(model: str, request: Request) -> Response:
    """Let requests in again, unless something sleeps. What the pause has frozen goes on."""
    tree = await read_json(request)
    body = parse(UnpauseBody, tree)
    return await _run(Kind.UNPAUSE, model, request, body, on_conflict_of(Dialect.NATIVE, tree), DrainSpec())


async def _run(
    kind: Kind, model: str, request: Request, body: UnpauseBody, default: OnConflict, drain: DrainSpec
) -> Response:
    wish = OperationRequest(
        kind,
        model,
        (),
        drain=drain,
        on_conflict=OnConflict(body.on_conflict or default),
        timeout_s=body.timeout_s,
    )
    return await run_on(context_of(request).control, request, wish)
