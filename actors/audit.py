"""Who has changed what through a front door: a message, written into the journal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One call, answered or refused. at: Unix time of its answer. caller: the name of its token.

    call: method and route, such as `POST /models/{model}/sleep`. operation: ids, with commas between; "" = none begun.
    """

    at: float
    caller: str
    address: str
    call: str
    model: str
    status: int  # HTTP's
    code: str  # of the problem that the answer was, else ""
    operation: str
    request: str  # its X-Request-Id
