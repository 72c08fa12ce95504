"""The service from Python, over HTTP: `Client`, and `AsyncClient` with the same calls to be awaited."""

from torpor.service.client.asleep import Freed
from torpor.service.client.awaited import AsyncClient
from torpor.service.client.blocking import Client
from torpor.service.client.calls import ChatAnswer
from torpor.service.client.errors import (
    BadRequest,
    ClientError,
    ConnectionFailed,
    Denied,
    Failed,
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
