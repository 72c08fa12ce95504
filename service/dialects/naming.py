"""The model that the URL of a native call names: in its path, its mount, or its query."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.requests import Request

from torpor.service.dialects.mounts import mounted_model
from torpor.service.problems import Code, Problem

_NAMES = ("model", "id")


def url_model(request: Request, shape: type[BaseModel], path_model: str | None = None) -> str | None:
    """None: it names none. shape: the call's body. Raises a Problem for two names, and for its fields in the query.

    Passed over, `?dry_run=true` would sleep in earnest, and `?model=other` the only model.
    """
    misplaced = sorted(set(request.query_params) & set(shape.model_fields) - set(_NAMES))
    if misplaced:
        detail = f"The query has {', '.join(misplaced)}, which this call reads from its body."
        raise Problem(
            422, Code.INVALID_FIELD, detail, hint="Send it as a field of a JSON object in the body."
        )
    given = {value for name in _NAMES for value in request.query_params.getlist(name) if value}
    mounted = path_model or mounted_model(request)
    names = sorted({*given, *(() if mounted is None else (mounted,))})
    if len(names) > 1:
        detail = f"The URL names several models: {', '.join(names)}."
        raise Problem(422, Code.INVALID_FIELD, detail, hint="Name one model, once.")
    return names[0] if names else None
