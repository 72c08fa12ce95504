"""The front door: HTTP, command line, Python client."""

from torpor.service.client import (
    AsyncClient,
    BadRequest,
    ChatAnswer,
    Client,
    ClientError,
    ConnectionFailed,
    Denied,
    Failed,
    Freed,
    NotFound,
    ProblemError,
    Rejected,
    Unavailable,
)

__all__ = [
    "AsyncClient",
    "BadRequest",
    "ChatAnswer",
    "Client",
    "ClientError",
    "ConnectionFailed",
    "Denied",
    "Failed",
    "Freed",
    "NotFound",
    "ProblemError",
    "Rejected",
    "Unavailable",
]
