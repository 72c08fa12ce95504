"""OpenAPI of bodies that routes read by hand, so that malformed JSON and unknown fields get our own answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "code", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string"},
        "detail": {"type": "string"},
        "hint": {"type": "string", "description": "What to do next"},
        "operation_id": {"type": "string"},
        "needed_bytes": {"type": "integer"},
        "free_bytes": {"type": "integer"},
        "ranks": {"type": "array", "items": {"type": "object"}},
    },
}


def json_body(shape: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route with this optional JSON body."""
    return {"requestBody": {"content": {"application/json": {"schema": _inlined(shape)}}, "required": False}}


def _inlined(shape: type[BaseModel]) -> dict[str, Any]:
    """The schema without $defs, whose references would point outside the route."""
    schema = shape.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return resolve(definitions[node["$ref"].rsplit("/", 1)[-1]])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(item) for item in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = resolve(schema)
    return resolved
