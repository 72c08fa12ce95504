"""What each call answers, as a table: the shape of its success, and which problems it may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ANY_CALL = (401, 403, 429, 500, 503)
WITH_QUERY = (400, 422)
WITH_BODY = (*WITH_QUERY, 408, 413)
OF_A_MODEL = (404,)
OPERATION = (*WITH_BODY, *OF_A_MODEL, 409, 412, 504, 507)


@dataclass(frozen=True, slots=True)
class Answer:
    """shape: a component's name, or a medium such as text/plain; "" = no body at all. problems: beside ANY_CALL.

    native: 202 with `Prefer: respond-async`, and the headers of operations count.
    """

    shape: str
    problems: tuple[int, ...] = ()
    native: bool = False


_NATIVE = Answer("Operation", OPERATION, native=True)
_FANNED_OUT = Answer("OperationOrOperations", OPERATION, native=True)
_DROP_IN = Answer("Any", OPERATION)
_LOOK = Answer("Object", (*WITH_QUERY, *OF_A_MODEL))
_PROBE = Answer("Status")

ANSWERS: Mapping[str, Answer] = {
    "POST /sleep": Answer("Any", OPERATION, native=True),  # vLLM's clients get no body
    "POST /wake": _FANNED_OUT,
    "POST /models/{model}/sleep": _FANNED_OUT,
    "POST /models/{model}/wake": _FANNED_OUT,
    "GET /models": Answer("Models"),
    "GET /models/{model}": Answer("Model", OF_A_MODEL),
    "DELETE /models/{model}": _NATIVE,
    "POST /models/{model}/recover": _NATIVE,
    "POST /models/{model}/pause": _NATIVE,
    "POST /models/{model}/unpause": _NATIVE,
    "POST /models/{model}/update_weights": _NATIVE,
    "POST /models/{model}/trim": Answer("Trimmed", (*WITH_BODY, *OF_A_MODEL, 409)),
    "GET /operations": Answer("Operations", (*WITH_QUERY, *OF_A_MODEL)),
    "GET /operations/{operation_id}": Answer("Operation", OF_A_MODEL),
    "POST /operations/{operation_id}/cancel": Answer("Operation", (*OF_A_MODEL, 409)),
    "POST /operations/{operation_id}/renew": Answer("RenewedHold", (*OF_A_MODEL, 409)),
    "GET /events": Answer("text/event-stream", WITH_QUERY),
    "GET /audit": Answer("Audit", WITH_QUERY),
    "POST /release_memory": _DROP_IN,
    "POST /resume_memory": _DROP_IN,
    "GET /memory_status": _LOOK,
    "POST /wake_up": _DROP_IN,
    "POST /wakeup": _DROP_IN,
    "GET /is_sleeping": _LOOK,
    "POST /pause": _DROP_IN,
    "POST /resume": _DROP_IN,
    "GET /is_paused": _LOOK,
    "POST /reset_prefix_cache": _DROP_IN,
    "POST /release_memory_occupation": _DROP_IN,
    "POST /resume_memory_occupation": _DROP_IN,
    "POST /update_weights_from_disk": _DROP_IN,
    "POST /pause_generation": _DROP_IN,
    "POST /continue_generation": _DROP_IN,
    "POST /abort_request": _DROP_IN,
    "GET /flush_cache": _DROP_IN,
    "POST /flush_cache": _DROP_IN,
    "GET /health_generate": Answer("Any", (*WITH_QUERY, *OF_A_MODEL)),
    "GET /v1/models": Answer("Object", OF_A_MODEL),
    "GET /v1/models/{name}": Answer("Object", OF_A_MODEL),
    "POST /v1/chat/completions": Answer("Completion", (*WITH_BODY, *OF_A_MODEL, 409)),
    "POST /v1/completions": Answer("Completion", (*WITH_BODY, *OF_A_MODEL, 409)),
    "GET /livez": _PROBE,
    "GET /readyz": _PROBE,
    "GET /health": _PROBE,
    "GET /metrics": Answer("text/plain"),
}
