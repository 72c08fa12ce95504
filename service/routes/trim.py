"""Host memory that ranks keep between sleeps for speed, given back on request (M8)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from torpor.actors.messages import RejectCode
from torpor.service.bodies import parse, read_json, unknown_model
from torpor.service.context import context_of
from torpor.service.docs import json_body
from torpor.service.logs import note
from torpor.service.operations import published_models
from torpor.service.problems import Problem

router = APIRouter(tags=["native"])


class TrimBody(BaseModel):
    """target_bytes: that each rank may go on keeping."""

    model_config = ConfigDict(extra="forbid", strict=True)
    target_bytes: Annotated[int, Field(ge=0, lt=1 << 63)] = 0


@router.post("/models/{model}/trim", openapi_extra=json_body(TrimBody))
async def trim(model: str, request: Request) -> dict[str, Any]:
    """Give idle host memory back, and backups of weights that are awake; the next sleep makes them anew.

    What sleeps loses nothing. It waits for a sleep or wake that is being staged.
    """
    body = parse(TrimBody, await read_json(request))
    control = context_of(request).control
    note(request, model=model)
    try:
        ranks = await control.trim(model, body.target_bytes)
    except KeyError:
        raise unknown_model(model, [view.name for view in await published_models(control)]) from None
    records = [dataclasses.asdict(rank) for rank in ranks]
    freed_bytes = sum(rank.freed_bytes for rank in ranks)
    silent = next((rank for rank in ranks if rank.error), None)
    if silent is not None:
        detail = f"rank {silent.rank} of {model!r} told nothing: {silent.error}; {freed_bytes} bytes were given back."
        hint = f"Look at GET /models/{model}; repeat when the rank answers."
        raise Problem(409, RejectCode.RANK_FAILED, detail, hint=hint, ranks=records)
    return {"model": model, "freed_bytes": freed_bytes, "ranks": records}
