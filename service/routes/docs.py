"""GET /docs: the list of calls for people."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from torpor.service.openapi.page import POLICY, page

router = APIRouter()


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    return HTMLResponse(page(request.app.openapi()), headers={"Content-Security-Policy": POLICY})
