"""What a rank does as spans in its own process: phases beneath the coordinator's calls, and requests by their counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode
from ranks.bench import Bench
from ranks.toys import ToyEngine
from support.spans import PARENT, TRACE, TRACEPARENT, Spans, kept_spans, parent_of, told, trace_of

from torpor.actors.messages import DrainSpec, Kind, OperationRequest, Phase, PhaseCall
from torpor.actors.ports import QueueFull

SLEEP = OperationRequest(Kind.SLEEP, "chat", ("weights", "kv_cache"))
SECRET = "the prompt that nobody may read"


@pytest.fixture
def spans() -> Iterator[Spans]:
    with kept_spans() as spans:
        yield spans


def traced(phase: Phase) -> PhaseCall:
    return PhaseCall("op", phase, 1, TRACEPARENT)


async def until_one(spans: Spans, name: str) -> ReadableSpan:
    async with asyncio.timeout(5):
        while not spans.named(name):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return spans.one(name)


async def test_the_phases_of_a_traced_sleep_are_spans_beneath_their_calls(bench: Bench, spans: Spans) -> None:
    assert (await bench.core.preflight(traced(Phase.PREFLIGHT), SLEEP)).ok
    assert (await bench.core.drain(traced(Phase.DRAIN), DrainSpec(), 5.0, 10.0)).ok
    assert (await bench.core.stage(traced(Phase.STAGE), 5.0)).ok
    freed_bytes = (await bench.core.commit(traced(Phase.COMMIT))).freed_bytes
    assert (await bench.core.publish(traced(Phase.PUBLISH))).ok
    made = spans.all()
    assert [one.name for one in made] == [
        f"torpor rank {phase}" for phase in ("preflight", "drain", "stage", "commit", "publish")
    ]
    assert {(trace_of(one), parent_of(one)) for one in made} == {(TRACE, PARENT)}
    assert {(told(one, "operation"), told(one, "rank"), told(one, "outcome")) for one in made} == {
        ("op", 0, "ok")
    }
    assert told(spans.one("torpor rank commit"), "freed_bytes") == freed_bytes > 0


async def test_a_refusal_is_an_error_by_its_code_and_calls_of_no_trace_are_no_spans(
    bench: Bench, spans: Spans
) -> None:
    assert (await bench.preflight(SLEEP)).ok
    assert not spans.all()
    late = PhaseCall("op", Phase.PREFLIGHT, 0, TRACEPARENT)
    reply = await bench.core.preflight(late, SLEEP)
    refused = spans.one("torpor rank preflight")
    assert (told(refused, "outcome"), refused.status.status_code) == ("refused", StatusCode.ERROR)
    assert refused.status.description == reply.refusals[0].code


async def test_a_request_is_one_span_from_its_admission_to_its_end_with_counts_and_no_contents(
    bench: Bench, spans: Spans
) -> None:
    request = replace(bench.request(tokens=3, prompt=SECRET), traceparent=TRACEPARENT)
    assert await bench.admit(request) == ["admitted"]
    span = await until_one(spans, "torpor generate")
    assert (trace_of(span), parent_of(span)) == (TRACE, PARENT)
    assert (told(span, "completion_tokens"), told(span, "finish_reason")) == (3, "length")
    assert span.end_time is not None and span.start_time is not None and span.end_time > span.start_time
    assert SECRET not in span.to_json()


async def test_a_request_that_breaks_is_an_error_and_one_that_is_not_let_in_is_no_span(
    bench: Bench, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: ToyEngine, prepared: object) -> None:
        raise QueueFull("why not")

    with monkeypatch.context() as patch:
        patch.setattr(ToyEngine, "submit", refuse)
        assert await bench.admit(bench.request()) == ["full"]
    assert await bench.admit(bench.request(tokens=10_000)) == ["admitted"]
    bench.core.fail("the model is lost")
    span = await until_one(spans, "torpor generate")
    assert (told(span, "finish_reason"), span.status.status_code) == ("error", StatusCode.ERROR)
