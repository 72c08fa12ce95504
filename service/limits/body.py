"""Reads a request's body within its bounds; it is held in memory whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request

from torpor.service.limits.bounds import Bounds
from torpor.service.problems import Code, Problem


async def read_bounded(request: Request, bounds: Bounds, refused: Callable[[str], None]) -> bytes:
    """Raises a Problem for one that is too large, before all of it has come, or comes too slowly."""
    declared = request.headers.get("content-length", "")
    if (
        declared.isascii()
        and declared.isdigit()
        and (len(declared) > 18 or int(declared) > bounds.body_bytes)
    ):
        refused("body_bytes")
        raise _too_large(bounds)
    raw = bytearray()
    try:
        async with asyncio.timeout(bounds.body_timeout_s):
            async for part in request.stream():
                raw += part
                if len(raw) > bounds.body_bytes:
                    refused("body_bytes")
                    raise _too_large(bounds)
    except TimeoutError:
        refused("body_timeout_s")
        detail = f"The body did not come whole within {bounds.body_timeout_s:g} s (limits.body_timeout_s)."
        hint = "Send it faster; nothing was begun."
        raise Problem(408, Code.BODY_TOO_SLOW, detail, hint=hint, headers={"Connection": "close"}) from None
    return bytes(raw)


def _too_large(bounds: Bounds) -> Problem:
    detail = f"The body is larger than {bounds.body_bytes} bytes (limits.body_bytes)."
    hint = "Send less in one request, or raise the limit."
    return Problem(413, Code.BODY_TOO_LARGE, detail, hint=hint, headers={"Connection": "close"})
