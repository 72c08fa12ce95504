"""GET /audit: who has changed what."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from torpor.service.context import context_of

router = APIRouter(tags=["native"])


@router.get("/audit")
async def audit(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
    """Calls that changed something, or were refused for want of a role, newest first; by the names of their tokens."""
    entries = await context_of(request).control.audits(limit)
    return {"audit": [dataclasses.asdict(entry) for entry in entries]}
