"""TensorRT-LLM's memory calls: release, resume, status. They answer once memory is free or back, on every rank."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from torpor.actors.messages import ModelView
from torpor.service.dialects.bodies import TagsBody, query_parameters
from torpor.service.dialects.carrying import TAGS, answer, hear, sleep, to_its_end, wake
from torpor.service.dialects.dialect import Dialect
from torpor.service.docs import json_body
from torpor.service.operations import find_model

router = APIRouter(tags=["drop-in"])


@router.post("/release_memory", openapi_extra=json_body(TagsBody))
async def release_memory(request: Request) -> Response:
    """Sleep, by tags."""
    asked = await hear(request, Dialect.TENSORRT_LLM, TAGS)
    return answer(asked, await to_its_end(sleep(asked)))


@router.post("/resume_memory", openapi_extra=json_body(TagsBody))
async def resume_memory(request: Request) -> Response:
    """Wake, by tags."""
    asked = await hear(request, Dialect.TENSORRT_LLM, TAGS)
    return answer(asked, await to_its_end(wake(asked)))


@router.get("/memory_status", openapi_extra=query_parameters("model", "id"))
async def memory_status(request: Request) -> Response:
    """State and parked tags."""
    asked = await hear(request, Dialect.TENSORRT_LLM)
    return JSONResponse(_status(await find_model(asked.control, asked.view.name)))


def _status(view: ModelView) -> dict[str, Any]:
    return {
        "model": view.name,
        "state": view.state,
        "parked_tags": sorted(view.parked_tags),
        "tags": sorted(view.tags),
        "gate": {"open": view.gate_open, "reason": view.gate_reason},
    }
