"""Other weights for a model that runs."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from torpor.actors.messages import DrainMode, DrainSpec, Kind, OnConflict, OperationRequest
from torpor.service.bodies import DrainBody, Seconds, parse, read_json
from torpor.service.context import context_of
from torpor.service.docs import json_body
from torpor.service.operations import run_on

router = APIRouter(tags=["native"])


class UpdateBody(BaseModel):
    """path: a safetensors folder or a GGUF file of the ranks' nodes, under weights_roots."""

    model_config = ConfigDict(extra="forbid", strict=True)
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    drain: DrainBody = Field(default_factory=DrainBody)
    dry_run: bool = False
    on_conflict: Literal["reject", "wait"] = "reject"
    timeout_s: Seconds | None = None


@router.post("/models/{model}/update_weights", openapi_extra=json_body(UpdateBody))
async def update_weights(model: str, request: Request) -> Response:
    """Write other weights into all ranks where they lie, or into none. Prefixes are forgotten; the version rises."""
    body = parse(UpdateBody, await read_json(request))
    wish = OperationRequest(
        Kind.UPDATE,
        model,
        ("weights",),
        drain=DrainSpec(DrainMode(body.drain.mode), body.drain.timeout_s, body.drain.freeze_timeout_s),
        dry_run=body.dry_run,
        on_conflict=OnConflict(body.on_conflict),
        timeout_s=body.timeout_s,
        weights_path=body.path,
    )
    return await run_on(context_of(request).control, request, wish)
