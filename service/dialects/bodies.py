"""The bodies of drop-in calls, for their documentation; what they mean is read in wishes.py."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Lenient(BaseModel):
    """Unknown fields are ignored, and named in the header Torpor-Ignored."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None


class NoFields(_Lenient):
    """Nothing but the model."""


class TagsBody(_Lenient):
    tags: list[str] | None = None


class PauseGenerationBody(_Lenient):
    mode: str | None = None  # abort, retract, in_place


class AbortBody(_Lenient):
    rid: str | None = None
    abort_all: bool = False


class UpdateFromDiskBody(_Lenient):
    model_path: str
    abort_all_requests: bool = False


class OptionsBody(_Lenient):
    """options of a sleep: level, mode, tags; of a wake: tags; of a pause: mode."""

    options: dict[str, Any] | None = None


def query_parameters(*names: str) -> dict[str, Any]:
    """`openapi_extra` of a call whose query has these parameters."""
    schemas: dict[str, dict[str, Any]] = {
        "level": {"type": "integer", "enum": [0, 1, 2]},
        "mode": {"type": "string", "enum": ["abort", "wait", "keep"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "model": {"type": "string"},
        "id": {"type": "string", "description": "The model, as `model`"},
    }
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": schemas[name]} for name in names
        ]
    }
