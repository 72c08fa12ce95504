"""Errors as HTTP answers: RFC 9457 problem details, the status of each code, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from starlette.responses import JSONResponse

from torpor.actors.messages import Operation, OperationState, RejectCode
from torpor.service.units import sentences
from torpor.service.wire import operation_json

LONGEST = 2000  # characters of a detail: it may repeat what was sent
MEDIA_TYPE = "application/problem+json"


class Code(StrEnum):
    """Codes of the front door's own; the coordinator's are RejectCode."""

    MALFORMED_JSON = "malformed_json"
    BODY_TOO_LARGE = "body_too_large"
    BODY_TOO_SLOW = "body_too_slow"
    TOO_MANY_REQUESTS = "too_many_requests"
    OVERLOADED = "overloaded"
    UNKNOWN_FIELD = "unknown_field"
    INVALID_FIELD = "invalid_field"
    UNKNOWN_MODE = "unknown_mode"
    EMPTY_TAGS = "empty_tags"
    MODEL_REQUIRED = "model_required"
    UNKNOWN_OPERATION = "unknown_operation"
    OPERATION_FINISHED = "operation_finished"
    NO_LEASE = "no_lease"
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"
    FAILED = "operation_failed"
    GATE_CLOSED = "gate_closed"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    GENERATION_FAILED = "generation_failed"
    NO_SUCH_PATH = "no_such_path"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    COORDINATOR_UNREACHABLE = "coordinator_unreachable"
    INTERNAL = "internal"


REJECT_STATUS: Mapping[RejectCode, int] = {
    RejectCode.UNKNOWN_MODEL: 404,
    RejectCode.UNKNOWN_TAG: 400,
    RejectCode.CONFLICT: 409,
    RejectCode.HELD: 409,
    RejectCode.GENERATION: 412,
    RejectCode.WRONG_STATE: 409,
    RejectCode.DEVICE_MEMORY: 507,
    RejectCode.HOST_MEMORY: 507,
    RejectCode.DISK_SPACE: 507,
    RejectCode.CONTENTS_CORRUPT: 409,
    RejectCode.EXTERNAL_REGISTRATION: 409,
    RejectCode.DEVICE_BUSY: 504,
    RejectCode.NOT_IDLE: 409,
    RejectCode.DRAIN_TIMEOUT: 504,
    RejectCode.STAGE_TIMEOUT: 504,
    RejectCode.DIGEST_MISMATCH: 409,
    RejectCode.RANK_FAILED: 409,
    RejectCode.STALE_WEIGHTS: 409,
    RejectCode.WEIGHTS_REFUSED: 422,
    RejectCode.REFUSED: 409,
    RejectCode.CANCELLED: 409,
}

REJECT_HINT: Mapping[RejectCode, str] = {
    RejectCode.UNKNOWN_MODEL: "Name one of the known models.",
    RejectCode.UNKNOWN_TAG: "Name some of the known tags, or leave `tags` out for all.",
    RejectCode.CONFLICT: 'Wait for the running operation, cancel it, or send `"on_conflict": "wait"`.',
    RejectCode.GENERATION: "Look at GET /models/{m} and repeat with its generation.",
    RejectCode.HELD: "It was put to sleep on purpose. Wake it with POST /models/{m}/wake.",
    RejectCode.WRONG_STATE: (
        'Look at GET /models/{m}; `"on_conflict": "wait"` waits for a loading model, and '
        "POST /models/{m}/recover rebuilds a failed one."
    ),
    RejectCode.DEVICE_MEMORY: "Free device memory (let another model sleep), then repeat; nothing was lost.",
    RejectCode.HOST_MEMORY: (
        'Sleep with a restore mode that keeps less, raise the host tier or node.host_bytes, or send `"overflow": '
        '"evict"` to drop reusable prefixes.'
    ),
    RejectCode.DISK_SPACE: "Sleep with another restore mode, or free room on the disk, or raise node.disk_bytes.",
    RejectCode.CONTENTS_CORRUPT: (
        "It sleeps on, and what was saved is kept as it is. Repeat once; if it lasts, let the tag that is named sleep "
        "with `none` and recover the model."
    ),
    RejectCode.EXTERNAL_REGISTRATION: "Close the registration that is named, then repeat.",
    RejectCode.DEVICE_BUSY: "Something still computes on the device; repeat when it has ended.",
    RejectCode.NOT_IDLE: 'Repeat when nothing runs, or with `"drain": {"mode": "freeze"}`; nothing was changed.',
    RejectCode.DRAIN_TIMEOUT: 'Repeat with a longer `drain.timeout_s` or with `"drain": {"mode": "abort"}`.',
    RejectCode.STAGE_TIMEOUT: "Repeat with a longer `timeout_s`; everything is as before.",
    RejectCode.DIGEST_MISMATCH: "The ranks disagree; everything is as before. Repeat, and report it if it lasts.",
    RejectCode.RANK_FAILED: "Look at `ranks` for the one that failed; everything is as before.",
    RejectCode.STALE_WEIGHTS: 'Send `"accept_stale_weights": true`, then push the weights again.',
    RejectCode.WEIGHTS_REFUSED: "Correct what is named; the model has the weights that it had.",
    RejectCode.REFUSED: "Look at `ranks` for the reasons; everything is as before.",
    RejectCode.CANCELLED: "It was cancelled; everything is as before. Repeat when you want it after all.",
}


class Problem(Exception):
    """An answer that is an error. `hint` says what to do next; `fields` are extra members of the body."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        hint: str = "",
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = str(code)
        self.detail = detail if len(detail) <= LONGEST else f"{detail[:LONGEST]}…"
        self.hint = hint
        self.headers = dict(headers or {})
        self.fields = fields

    def body(self, path: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "type": f"urn:torpor:problem:{self.code}",
            "title": self.code.replace("_", " ").capitalize(),
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            "instance": path,
        }
        if self.hint:
            body["hint"] = self.hint
        body.update(self.fields)
        if path.startswith("/v1/"):
            body["error"] = openai_error(self)
        return body

    def response(self, path: str) -> JSONResponse:
        return JSONResponse(self.body(path), self.status, self.headers, media_type=MEDIA_TYPE)


def openai_error(problem: Problem) -> dict[str, Any]:
    """The `error` object that OpenAI clients parse."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
    kind = kinds.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
    message = sentences(problem.detail, problem.hint)
    return {"message": message, "type": kind, "param": problem.fields.get("param"), "code": problem.code}


def operation_problem(operation: Operation, known: Mapping[str, Any] | None = None) -> Problem | None:
    """The problem that an operation's end is, or None when it succeeded (or still runs)."""
    if operation.state in (OperationState.SUCCEEDED, OperationState.RUNNING):
        return None
    record = operation_json(operation)
    fields: dict[str, Any] = {"operation_id": operation.id, "ranks": record["ranks"], "operation": record}
    for name in ("needed_bytes", "free_bytes"):
        if record[name] is not None:
            fields[name] = record[name]
    fields.update(known or {})
    verb = f"{operation.kind} of {operation.model!r}"
    lost = operation.prefix_tokens_lost
    told = f"; {lost} tokens of reusable prefixes were dropped before that" if lost else ""
    if operation.state is OperationState.FAILED:
        hint = (
            "Its gate stays closed. Look at `ranks` for what failed; "
            f"POST /models/{operation.model}/recover rebuilds it."
        )
        detail = f"{verb} failed: {operation.reason or 'a rank did not commit'}{told}"
        return Problem(500, Code.FAILED, detail, hint=hint, **fields)
    code = operation.code or RejectCode.REFUSED
    detail = f"{verb} rejected: {operation.reason or code}{told}"
    hint = REJECT_HINT[code].replace("{m}", operation.model)
    return Problem(REJECT_STATUS[code], code, detail, hint=hint, **fields)
