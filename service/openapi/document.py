"""Makes the document. `make openapi` keeps it in docs/openapi.json."""

from __future__ import annotations

import http
import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from torpor.service.auth.access import CALLS, OPEN
from torpor.service.openapi.answers import ANSWERS, ANY_CALL, Answer
from torpor.service.openapi.shapes import reference, shapes
from torpor.service.problems import MEDIA_TYPE

_VERBS = frozenset({"get", "post", "delete", "put", "patch"})
_ASYNC = "With `Prefer: respond-async`: it has begun; Location is where to look."


def document(app: FastAPI) -> dict[str, Any]:
    """Raises KeyError for a route that the table of answers lacks."""
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path, calls in made["paths"].items():
        for verb, call in calls.items():
            if verb in _VERBS:
                _describe(call, f"{verb.upper()} {path}")
    components = made.setdefault("components", {})
    components["schemas"] = shapes()
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return made


def text(app: FastAPI) -> str:
    """As it is kept: the same on every machine. The version is the release's own, not that of an installation."""
    return (
        json.dumps(document(app) | {"info": _info(app)}, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    )


def _info(app: FastAPI) -> dict[str, str]:
    return {"title": app.title, "version": app.version.partition("+")[0], "description": app.description}


def _describe(call: dict[str, Any], name: str) -> None:
    answer = ANSWERS[name]
    call["responses"] = _responses(answer)
    call["security"] = [] if name in CALLS[OPEN] else [{"token": []}]
    if answer.native:
        call.setdefault("parameters", []).extend(_operation_headers())
    if name == "GET /events":
        call.setdefault("parameters", []).append(
            _header("Last-Event-ID", "First what has come since this one.")
        )


# Without a schema: OpenAPI 3.1 has none for the events of a stream, and readers differ over whose it would be.
EVENTS = "text/event-stream"


def _responses(answer: Answer) -> dict[str, Any]:
    said: dict[str, Any] = {"200": {"description": "Done", **_content(answer.shape)}}
    if answer.native:
        begun = "OperationOrOperations" if answer.shape == "Any" else answer.shape
        said["202"] = {"description": _ASYNC, **_content(begun)}
    for status in sorted({*ANY_CALL, *answer.problems}):
        described = {"description": http.HTTPStatus(status).phrase}
        said[str(status)] = described | {"content": {MEDIA_TYPE: {"schema": reference("Problem")}}}
    if answer.shape == "Status":
        said["503"]["content"]["application/json"] = {"schema": reference("Status")}
    return said


def _content(shape: str) -> dict[str, Any]:
    if shape == "Any":  # some clients expect JSON, some no body at all
        return {}
    if "/" in shape:
        return {"content": {shape: {} if shape == EVENTS else {"schema": {"type": "string"}}}}
    content: dict[str, Any] = {"application/json": {"schema": reference(shape)}}
    if shape == "Completion":
        content[EVENTS] = {}
    return {"content": content}


def _operation_headers() -> Sequence[dict[str, Any]]:
    return (
        _header("Idempotency-Key", "The same key gives the same operation."),
        _header("Prefer", "respond-async: answer as soon as it has begun."),
        _header("If-Match", "A generation: refused (412) where the model has changed since."),
    )


def _header(name: str, what: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "schema": {"type": "string"},
        "description": what,
    }
