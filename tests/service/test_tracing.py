"""What is traced of a request at the front door: its operations and its generations, beneath it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode
from service_rig import Rig
from support.spans import PARENT, TRACE, TRACEPARENT, Spans, kept_spans, parent_of, told, trace_of

from torpor.actors.tracing import marks

HEADERS = {"traceparent": TRACEPARENT}


@pytest.fixture
def spans() -> Iterator[Spans]:
    with kept_spans() as spans:
        yield spans


async def test_an_operation_and_its_phases_are_spans_of_the_caller_s_trace(
    wide_rig: Rig, spans: Spans
) -> None:
    record = (await wide_rig.http.post("/models/chat/sleep", headers=HEADERS)).json()
    whole = spans.one("torpor sleep")
    phases = spans.beneath(whole)
    assert [span.name for span in phases] == [f"torpor sleep {one['name']}" for one in record["phases"]]
    assert told(whole, "operation") == record["id"]
    assert (told(whole, "model"), told(whole, "outcome")) == ("chat", "succeeded")
    assert whole.status.status_code is StatusCode.UNSET
    assert {trace_of(span) for span in (whole, *phases)} == {TRACE}
    assert parent_of(whole) not in (None, PARENT), "the request is between"
    for span, phase in zip(phases, record["phases"], strict=True):
        assert span.start_time is not None and span.end_time is not None
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(phase["seconds"], abs=1e-5)
        assert span.attributes == {"torpor.bytes": phase["bytes"]}
    freed = [event.attributes["torpor.freed_bytes"] for event in whole.events if event.attributes]
    assert freed == [rank["freed_bytes"] for rank in record["ranks"]] and len(freed) == 3


async def test_an_operation_that_nobody_waits_for_is_traced_alike(rig: Rig, spans: Spans) -> None:
    headers = {**HEADERS, "Prefer": "respond-async"}
    begun = await rig.http.post("/models/chat/sleep", headers=headers)
    assert begun.status_code == 202
    await rig.coordinator.wait(begun.json()["id"], 10.0)
    whole = spans.one("torpor sleep")
    assert (trace_of(whole), told(whole, "operation")) == (TRACE, begun.json()["id"])
    assert spans.beneath(whole)


async def test_a_dialect_s_sleep_is_traced_alike(rig: Rig, spans: Spans) -> None:
    assert (await rig.http.post("/release_memory_occupation", json={}, headers=HEADERS)).status_code == 200
    assert trace_of(spans.one("torpor sleep")) == TRACE


async def test_a_refused_operation_is_an_error_with_its_reason(rig: Rig, spans: Spans) -> None:
    body = (await rig.http.post("/sleep", json={"tags": ["nothing"]})).json()
    span = spans.one("torpor sleep")
    assert (span.status.status_code, told(span, "code")) == (StatusCode.ERROR, "unknown_tag")
    assert span.status.description == body["operation"]["reason"]


async def test_an_answer_that_is_given_once_more_is_no_operation_once_more(rig: Rig, spans: Spans) -> None:
    for _ in range(2):
        await rig.http.post("/sleep", headers={"Idempotency-Key": "1", **HEADERS})
    assert len(spans.named("torpor sleep")) == 1


async def test_a_generation_is_told_which_trace_it_belongs_to(rig: Rig, spans: Spans) -> None:
    body = {"model": "chat", "prompt": ["a", "b"]}
    assert (await rig.http.post("/v1/completions", json=body, headers=HEADERS)).status_code == 200
    parents = [one.traceparent for one in rig.inference.seen]
    assert len(parents) == 2 and {one.split("-")[1] for one in parents} == {TRACE}


@pytest.mark.parametrize(
    ("sent", "carried"), [(TRACEPARENT, TRACEPARENT), ("00-nonsense-01", ""), ("x" * 55, "")]
)
async def test_without_a_provider_here_the_caller_s_context_is_passed_on_if_it_is_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, sent: str, carried: str
) -> None:
    monkeypatch.setattr(marks, "_traceparent", lambda context: "")
    body = {"model": "chat", "prompt": "a"}
    await rig.http.post("/v1/completions", json=body, headers={"traceparent": sent})
    assert [one.traceparent for one in rig.inference.seen] == [carried]


async def test_without_the_package_everything_goes_on(
    rig: Rig, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert marks.trace is trace
    monkeypatch.setattr(marks, "trace", None)
    assert (await rig.http.post("/sleep", headers=HEADERS)).status_code == 200
    assert not spans.all()
