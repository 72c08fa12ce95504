"""Spans of work that one process does for another. Without the package, or a provider, they cost next to nothing.

The context travels as W3C `traceparent`, a string in the message; "" = nobody traces this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:  # the extra `otel` is not installed
    trace = None  # type: ignore[assignment]

Value = str | bool | int | float | Sequence[str]


class Mark:
    """A span that has begun, or none: then everything here does nothing, and the context is passed on as it came."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Any = None, traceparent: str = "") -> None:
        """traceparent: for work that is done beneath this."""
        self._span = span
        self.traceparent = traceparent

    def tell(self, attributes: Mapping[str, Value]) -> None:
        if self._span is not None:
            self._span.set_attributes(_named(attributes))

    def happened(self, event: str, attributes: Mapping[str, Value]) -> None:
        """Something without a length of its own."""
        if self._span is not None:
            self._span.add_event(event, _named(attributes))

    def fail(self, why: str = "") -> None:
        if self._span is not None:
            self._span.set_status(trace.StatusCode.ERROR, why or None)

    def end(self, at_s: float | None = None) -> None:
        """at_s: Unix time; None = now."""
        if self._span is not None:
            self._span.end(_ns(at_s))


def begin(
    name: str,
    parent: str = "",
    at_s: float | None = None,
    attributes: Mapping[str, Value] | None = None,
) -> Mark:
    """A span beneath `parent`, a traceparent; "" or one that cannot be read: one that begins a trace.

    Whatever span is current in this process has nothing to do with it. at_s: Unix time; None = now. Attributes get
    the prefix `torpor.`; they are for sizes, names and outcomes, never for what a request or a model contains.
    """
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return Mark(None, parent)  # nobody has set one
    beneath = TraceContextTextMapPropagator().extract({"traceparent": parent}, Context())
    span = trace.get_tracer("torpor").start_span(
        name, beneath, attributes=_named(attributes or {}), start_time=_ns(at_s)
    )
    return Mark(span, _traceparent(trace.set_span_in_context(span)) or parent)


def current_traceparent() -> str:
    """Of the span that is current in this process, to send along; "" where there is none."""
    return "" if trace is None else _traceparent(None)


def _traceparent(context: Any) -> str:
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context)
    return carrier.get("traceparent", "")


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"torpor.{name}": value for name, value in attributes.items()}


def _ns(unix_s: float | None) -> int | None:
    return None if unix_s is None else int(unix_s * 1e9)
