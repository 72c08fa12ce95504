"""What the client raises: one class for each thing that a caller would do differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from torpor.service.units import sentences


class ClientError(Exception):
    """Base of everything that the client raises on purpose."""


class ConnectionFailed(ClientError):
    """Nobody answers at this address."""


class ProblemError(ClientError):
    """The service answered with an error: `status`, `code`, `detail`, `hint`, and the whole `body`."""

    def __init__(self, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self.status = status
        self.body = dict(body)
        self.code = str(body.get("code", "unknown"))
        self.detail = str(body.get("detail", f"HTTP status {status}"))
        self.hint = str(body.get("hint", ""))
        self.headers = dict(headers)
        super().__init__(sentences(self.detail, self.hint))


class BadRequest(ProblemError):
    """400 or 422: the request as such is wrong."""


class Denied(ProblemError):
    """401 or 403: no token, an unknown one, or one without the role that the call wants."""


class NotFound(ProblemError):
    """404: no such model or operation."""


class Rejected(ProblemError):
    """409, 412, 504 or 507: refused, everything is as before. `body["operation"]` has the record, if one began."""


class Unavailable(ProblemError):
    """429 or 503: not now. `retry_after_s` says when to ask again."""

    @property
    def retry_after_s(self) -> float:
        return float(self.headers.get("retry-after", "1"))


class Failed(ProblemError):
    """500: the operation or the service failed."""


ERROR_CLASSES: Mapping[int, type[ProblemError]] = {
    400: BadRequest,
    401: Denied,
    403: Denied,
    404: NotFound,
    408: Rejected,
    409: Rejected,
    413: BadRequest,
    412: Rejected,
    422: BadRequest,
    429: Unavailable,
    503: Unavailable,
    504: Rejected,
    507: Rejected,
}


def problem_error(response: httpx.Response) -> ProblemError:
    """The error that a read response is."""
    try:
        body = response.json()
    except ValueError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    kind = ERROR_CLASSES.get(response.status_code, Failed)
    return kind(response.status_code, body, response.headers)
