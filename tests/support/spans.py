"""The spans that this process makes, kept in memory while a test looks at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Spans:
    """Those of ours that have ended, in the order of their beginning."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def all(self) -> list[ReadableSpan]:
        return [one for one in self._exporter.get_finished_spans() if one.name.startswith("torpor ")]

    def named(self, name: str) -> list[ReadableSpan]:
        return [one for one in self.all() if one.name == name]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found

    def beneath(self, span: ReadableSpan) -> list[ReadableSpan]:
        return [one for one in self.all() if parent_of(one) == id_of(span)]


def id_of(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


def trace_of(span: ReadableSpan) -> str:
    return f"{span.context.trace_id:032x}"


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def told(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(f"torpor.{name}")


@contextmanager
def kept_spans() -> Iterator[Spans]:
    """A process has one provider for good: the first test makes it, the others listen to it, too."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Spans(exporter)
    exporter.shutdown()
    exporter.clear()
