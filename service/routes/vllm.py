"""vLLM's calls, and those of Ray Serve LLM over it. They answer when the memory is free, or back, on every rank."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from torpor.service.dialects.bodies import OptionsBody, query_parameters
from torpor.service.dialects.carrying import (
    LEVEL_MODE_TAGS,
    TAGS,
    Asked,
    answer,
    hear,
    sleep,
    to_its_end,
    understand,
    wake,
)
from torpor.service.dialects.dialect import Dialect, Tree
from torpor.service.docs import json_body

router = APIRouter(tags=["drop-in"])


async def sleep_as(request: Request, dialect: Dialect, tree: Tree | None) -> Response:
    """POST /sleep, as this dialect means it."""
    asked = await understand(request, dialect, tree, LEVEL_MODE_TAGS)
    return answer(asked, await to_its_end(sleep(asked)))


@router.post("/wake_up", openapi_extra=query_parameters("tags", "model", "id"))
async def wake_up(request: Request) -> Response:
    """Wake all, or some tags."""
    return await _wake(await hear(request, Dialect.VLLM, TAGS))


@router.post("/wakeup", openapi_extra=json_body(OptionsBody))
async def wakeup(request: Request) -> Response:
    """Wake all, or the options' tags."""
    return await _wake(await hear(request, Dialect.RAY_SERVE, TAGS))


@router.get("/is_sleeping", openapi_extra=query_parameters("model", "id"))
async def is_sleeping(request: Request) -> Response:
    """Whether any memory is asleep, or nobody is let in since the model is paused."""
    asked = await hear(request, Dialect.VLLM)
    return JSONResponse({"is_sleeping": bool(asked.view.parked_tags)})


async def _wake(asked: Asked) -> Response:
    return answer(asked, await to_its_end(wake(asked)))
