"""Models that come back and go: recover and delete."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from torpor.actors.messages import DrainMode, DrainSpec, Kind, ModelState, OnConflict, OperationRequest
from torpor.service.bodies import Seconds, parse, read_json
from torpor.service.context import context_of
from torpor.service.docs import json_body
from torpor.service.operations import run_on

router = APIRouter(tags=["native"])


class RecoverBody(BaseModel):
    """to: the state to reach, by default the one that was published last."""

    model_config = ConfigDict(extra="forbid", strict=True)
    to: Literal["awake", "asleep"] | None = None
    accept_stale_weights: bool = False  # weights that were updated come back as their source has them
    on_conflict: Literal["reject", "wait"] = "reject"
    timeout_s: Seconds | None = None  # to wait for its turn


class LastDrain(BaseModel):
    """There is no later to freeze for."""

    model_config = ConfigDict(extra="forbid", strict=True)
    mode: Literal["finish", "abort", "if_idle"] = "finish"
    timeout_s: Seconds | None = None


class DeleteBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    drain: LastDrain = Field(default_factory=LastDrain)
    on_conflict: Literal["reject", "wait"] = "reject"
    timeout_s: Seconds | None = None  # to wait for its turn


@router.post("/models/{model}/recover", openapi_extra=json_body(RecoverBody))
async def recover(model: str, request: Request) -> Response:
    """Replace all ranks of a model that is failed, or whose contents are undefined. One that is well stays as it is."""
    tree = await read_json(request)
    body = parse(RecoverBody, tree)
    wish = OperationRequest(
        Kind.RECOVER,
        model,
        on_conflict=OnConflict.WAIT if tree is None else OnConflict(body.on_conflict),
        timeout_s=body.timeout_s,
        to=ModelState(body.to) if body.to is not None else None,
        accept_stale_weights=body.accept_stale_weights,
    )
    return await run_on(context_of(request).control, request, wish)


@router.delete("/models/{model}", openapi_extra=json_body(DeleteBody))
async def delete(model: str, request: Request) -> Response:
    """End the model's ranks and forget it, once what runs has ended. Its memory is free when this answers."""
    tree = await read_json(request)
    body = parse(DeleteBody, tree)
    wish = OperationRequest(
        Kind.DELETE,
        model,
        drain=DrainSpec(DrainMode(body.drain.mode), body.drain.timeout_s),
        on_conflict=OnConflict.WAIT if tree is None else OnConflict(body.on_conflict),
        timeout_s=body.timeout_s,
    )
    return await run_on(context_of(request).control, request, wish)
