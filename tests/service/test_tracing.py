"""Operations as spans: beneath their request, with the coordinator's times, and nothing where there is no tracing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from service_rig import Rig

from torpor.service import tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def provider() -> Iterator[TracerProvider]:
    """The process's, for there can be one only; it is deaf afterwards."""
    made = TracerProvider()
    trace.set_tracer_provider(made)
    yield made
    made.shutdown()


@pytest.fixture
def spans(provider: TracerProvider) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def ours(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name.startswith("torpor ")]


async def test_an_operation_and_its_phases_are_spans_of_the_caller_s_trace(
    wide_rig: Rig, spans: InMemorySpanExporter
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    record = (await wide_rig.http.post("/models/chat/sleep", headers=headers)).json()
    *phases, whole = sorted(ours(spans), key=lambda span: span.name == "torpor sleep")
    assert [span.name for span in phases] == [f"torpor sleep {one['name']}" for one in record["phases"]]
    assert whole.name == "torpor sleep" and whole.attributes is not None
    assert whole.attributes["torpor.operation"] == record["id"]
    assert (whole.attributes["torpor.model"], whole.attributes["torpor.outcome"]) == ("chat", "succeeded")
    assert whole.status.status_code is StatusCode.UNSET
    assert {f"{span.context.trace_id:032x}" for span in (whole, *phases)} == {TRACE}
    assert whole.parent is not None and f"{whole.parent.span_id:016x}" != PARENT, "the request is between"
    for span, phase in zip(phases, record["phases"], strict=True):
        assert span.parent is not None and span.parent.span_id == whole.context.span_id
        assert span.start_time is not None and span.end_time is not None
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(phase["seconds"], abs=1e-5)
        assert span.attributes == {"torpor.bytes": phase["bytes"]}
    assert len(whole.events) == 3
    freed = [event.attributes["torpor.freed_bytes"] for event in whole.events if event.attributes]
    assert freed == [rank["freed_bytes"] for rank in record["ranks"]]


async def test_a_refused_operation_is_an_error_with_its_reason(rig: Rig, spans: InMemorySpanExporter) -> None:
    body = (await rig.http.post("/sleep", json={"tags": ["nothing"]})).json()
    (span,) = ours(spans)
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == body["operation"]["reason"]
    assert span.attributes is not None and span.attributes["torpor.code"] == "unknown_tag"


async def test_an_answer_that_is_given_once_more_is_no_operation_once_more(
    rig: Rig, spans: InMemorySpanExporter
) -> None:
    for _ in range(2):
        await rig.http.post("/sleep", headers={"Idempotency-Key": "1"})
    assert [span.name for span in ours(spans)].count("torpor sleep") == 1


async def test_without_the_package_everything_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "trace", None)
    assert (await rig.http.post("/sleep")).status_code == 200
