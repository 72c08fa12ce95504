"""/m/{model}/…: every surface once more for one model, to be the base URL of a client that knows of one only."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX = "/m/"
_KEY = "torpor.mounted_model"


def split_mount(path: str) -> tuple[str | None, str]:
    """The model that a path is mounted for, or None, and the path of the route, without a slash at its end.

    Clients write some paths with a slash; a redirect would lose their mount, and the body of some.
    """
    model = None
    name, _, rest = path.removeprefix(PREFIX).partition("/") if path.startswith(PREFIX) else ("", "", "")
    if name:  # a mount without one is no path at all
        model, path = name, f"/{rest}"
    return model, path.rstrip("/") or "/"


def mounted_model(request: Request) -> str | None:
    """The model that this request's base URL names."""
    model: str | None = request.scope.get(_KEY)
    return model


def mount_urls(request: Request, models: Sequence[str]) -> list[str]:
    """The request's URL once for each model."""
    base = str(request.base_url).rstrip("/")
    return [f"{base}{PREFIX}{quote(name, safe='')}{request.url.path}" for name in models]


class Mounts:
    """ASGI: routes see the path without its mount. What is around this sees the path as it came."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            model, path = split_mount(scope["path"])
            if path != scope["path"]:
                scope = {**scope, "path": path, "raw_path": quote(path).encode(), _KEY: model}
        await self._app(scope, receive, send)
