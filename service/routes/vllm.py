"""vLLM's calls, and those of Ray Serve LLM over it. They answer when the memory is free, or back, on every rank."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from torpor.actors.messages import DrainMode, Operation
from torpor.service.dialects.bodies import OptionsBody, query_parameters
from torpor.service.dialects.carrying import (
    LEVEL_MODE_TAGS,
    MODE,
    TAGS,
    Asked,
    answer,
    hear,
    pause,
    reset,
    sleep,
    to_its_end,
    understand,
    unpause,
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
    return JSONResponse({"is_sleeping": bool(asked.view.parked_tags) or asked.view.paused})


@router.post("/pause", openapi_extra=query_parameters("mode", "model", "id") | json_body(OptionsBody))
async def pause_generation(request: Request) -> Response:
    """Let nobody in. What runs is ended (abort, the default), waited for (wait), or goes on after a resume (keep)."""
    asked = await hear(request, Dialect.VLLM, MODE)
    return _told(asked, await to_its_end(pause(asked)), "paused")


@router.post("/resume", openapi_extra=query_parameters("model", "id") | json_body(OptionsBody))
async def resume(request: Request) -> Response:
    """End a pause. What sleeps stays asleep."""
    asked = await hear(request, Dialect.VLLM)
    return _told(asked, await to_its_end(unpause(asked)), "resumed")


@router.get("/is_paused", openapi_extra=query_parameters("model", "id"))
async def is_paused(request: Request) -> Response:
    asked = await hear(request, Dialect.VLLM)
    return JSONResponse({"is_paused": asked.view.paused})


@router.post("/reset_prefix_cache", openapi_extra=query_parameters("model", "id") | json_body(OptionsBody))
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all prefixes, on every tier. What runs stops for it between two tokens, and goes on."""
    asked = await hear(request, Dialect.VLLM)
    return answer(asked, await to_its_end(reset(asked, DrainMode.FREEZE)))


def _told(asked: Asked, operation: Operation, status: str) -> Response:
    """vLLM's calls say it in words; Ray Serve LLM's are empty."""
    return answer(asked, operation, {"status": status} if asked.wish.dialect is Dialect.VLLM else None)


async def _wake(asked: Asked) -> Response:
    return answer(asked, await to_its_end(wake(asked)))
