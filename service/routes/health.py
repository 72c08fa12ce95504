"""Probes and metrics. None of them wakes anything; a model that sleeps is ready."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from torpor.actors.messages import ModelState, ModelView
from torpor.service.context import Context, context_of
from torpor.service.dialects.mounts import mounted_model

router = APIRouter(tags=["health"])
READY_STATES = frozenset({ModelState.AWAKE, ModelState.SLEEPING, ModelState.ASLEEP, ModelState.WAKING})
_LISTED_OPERATIONS = 1000


@router.get("/livez")
async def livez() -> dict[str, str]:
    """This process answers. Says nothing of the cluster."""
    return {"status": "alive"}


@router.get("/readyz")
@router.get("/health")
async def readyz(request: Request) -> JSONResponse:
    """200 when the coordinator answers and some model is loaded, awake or asleep; else, or when this ends, 503.

    Under /m/{model}: that model.
    """
    context = context_of(request)
    status = "ending" if context.ending.is_set() else await _readiness(context, mounted_model(request))
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics. When the coordinator is silent, what this process knows by itself."""
    context = context_of(request)
    shown = False
    try:
        async with asyncio.timeout(context.metrics_timeout_s):
            context.metrics.show_models(await context.control.models(detail=True))
            shown = True
            context.metrics.count_operations(await context.control.operations(None, _LISTED_OPERATIONS))
            context.metrics.show_epoch((await context.control.changes(None, 0)).until.epoch)
    except Exception:  # an unreachable cluster must not take the front end's own metrics away
        if not shown:
            context.metrics.show_models([])
    return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _readiness(context: Context, only: str | None) -> str:
    try:
        async with asyncio.timeout(context.probe_timeout_s):
            views: list[ModelView] = await context.control.models(detail=False)
    except Exception:  # whatever keeps the coordinator from answering, the answer to the probe is no
        return "coordinator unreachable"
    views = [view for view in views if only in (None, view.name)]
    if any(view.state in READY_STATES for view in views):
        return "ready"
    return "loading" if any(view.state is ModelState.LOADING for view in views) else "no model loaded"
