"""Operations as OpenTelemetry spans, beneath the request that asked for them. Without the package nothing happens.

Their times are the coordinator's, as its record has them.
"""

from __future__ import annotations

from typing import Any

from torpor.actors.messages import Operation, OperationState

try:
    from opentelemetry import trace
    from opentelemetry.trace import StatusCode
except ImportError:  # the extra `otel` is not installed
    trace = None  # type: ignore[assignment]


def trace_operation(operation: Operation) -> None:
    """A finished one, with a span for each phase and an event for each rank."""
    if trace is None or operation.finished_at is None:
        return
    tracer = trace.get_tracer("torpor")
    span = tracer.start_span(
        f"torpor {operation.kind}", start_time=_ns(operation.created_at), attributes=_attributes(operation)
    )
    if operation.state is not OperationState.SUCCEEDED:
        span.set_status(StatusCode.ERROR, operation.reason or str(operation.state))
    beneath = trace.set_span_in_context(span)
    for phase in operation.phases:
        part = tracer.start_span(
            f"torpor {operation.kind} {phase.name}",
            context=beneath,
            start_time=_ns(phase.started_at),
            attributes={"torpor.bytes": phase.bytes},
        )
        part.end(_ns(phase.started_at + phase.seconds))
    for rank in operation.ranks:
        told: dict[str, str | int] = {
            "torpor.rank": rank.rank,
            "torpor.node": rank.node,
            "torpor.device": rank.device,
            "torpor.outcome": str(rank.outcome),
            "torpor.freed_bytes": rank.freed_bytes,
            "torpor.kept_bytes": rank.kept_bytes,
        }
        span.add_event("rank", told)
    span.end(_ns(operation.finished_at))


def _attributes(operation: Operation) -> dict[str, Any]:
    return {
        "torpor.operation": operation.id,
        "torpor.model": operation.model,
        "torpor.tags": list(operation.tags),
        "torpor.outcome": str(operation.state),
        "torpor.code": str(operation.code or ""),
        "torpor.dry_run": operation.dry_run,
    }


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)
