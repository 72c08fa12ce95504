"""What a request's operations are traced beneath. Their spans are made where the work is done, by the actors."""

from __future__ import annotations

import re

from starlette.requests import Request

from torpor.actors.tracing import current_traceparent

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent_of(request: Request) -> str:
    """The request's own span where this front end is traced; else what the caller sent, or ""."""
    sent = request.headers.get("traceparent", "").strip()
    return current_traceparent() or (sent if _TRACEPARENT.fullmatch(sent) else "")
