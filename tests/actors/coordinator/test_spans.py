"""Operations as spans where they are carried out: the whole, phases beneath it, and calls to ranks beneath those."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
from coordinator_memory_journal import JournalStore
from coordinator_rig import SLEEP, WAKE, MemoryRig, asking
from opentelemetry import trace
from opentelemetry.trace import StatusCode
from support.spans import PARENT, TRACE, TRACEPARENT, Spans, id_of, kept_spans, parent_of, told, trace_of

from torpor.actors.config import ClusterConfig, ModelConfig
from torpor.actors.coordinator import Fault, MemoryRank
from torpor.actors.coordinator.records import fingerprint, request_from_json, request_to_json, same_request
from torpor.actors.messages import Kind, OperationRequest, OperationState, PhaseCall

TRACED = replace(SLEEP, traceparent=TRACEPARENT)
CALLS = ("call preflight", "call drain", "call stage", "call commit", "call publish")


@pytest.fixture
def spans() -> Iterator[Spans]:
    with kept_spans() as spans:
        yield spans


@pytest.fixture
def rig() -> MemoryRig:
    """Two ranks."""
    return MemoryRig(JournalStore(), ClusterConfig(models=(ModelConfig("chat", tensor_parallel=2),)))


def heard_by(rig: MemoryRig, monkeypatch: pytest.MonkeyPatch) -> list[PhaseCall]:
    """The calls that ranks get, each through a real pickling."""
    heard: list[PhaseCall] = []
    stage = MemoryRank.stage

    async def listen(self: MemoryRank, call: PhaseCall, timeout_s: float) -> object:
        heard.append(pickle.loads(pickle.dumps(call)))
        return await stage(self, call, timeout_s)

    monkeypatch.setattr(MemoryRank, "stage", listen)
    return heard


def test_a_sleep_has_its_phases_beneath_it_and_calls_to_both_ranks_beneath_those(
    rig: MemoryRig, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        heard = heard_by(rig, monkeypatch)
        operation = await rig.do(pickle.loads(pickle.dumps(TRACED)))
        whole = spans.one("torpor sleep")
        assert (trace_of(whole), parent_of(whole)) == (TRACE, PARENT)
        assert (told(whole, "operation"), told(whole, "outcome")) == (operation.id, "succeeded")
        assert whole.status.status_code is StatusCode.UNSET
        phases = spans.beneath(whole)
        assert [one.name for one in phases] == [f"torpor sleep {one.name}" for one in operation.phases]
        calls = [call for phase in phases for call in spans.beneath(phase)]
        for name in CALLS:
            ranks = sorted(told(call, "rank") for call in calls if call.name == f"torpor {name}")
            assert ranks == ([0] if name == "call drain" else [0, 1]), name
        assert len(calls) == len(spans.all()) - len(phases) - 1, "nothing is beside them"
        assert {told(call, "outcome") for call in calls} == {"ok"}
        stages = {id_of(call) for call in calls if call.name == "torpor call stage"}
        assert {call.traceparent for call in heard} == {f"00-{TRACE}-{one}-01" for one in stages}

    rig.run(story)


def test_a_rejected_sleep_names_the_rank_that_refused_and_is_an_error(rig: MemoryRig, spans: Spans) -> None:
    async def story() -> None:
        rig.chat[1].fault("preflight", Fault.REFUSE)
        operation = await rig.do(TRACED)
        whole = spans.one("torpor sleep")
        assert operation.state is OperationState.REJECTED
        assert (told(whole, "outcome"), told(whole, "code")) == ("rejected", operation.code)
        assert (whole.status.status_code, whole.status.description) == (StatusCode.ERROR, operation.reason)
        outcomes = {told(one, "rank"): told(one, "outcome") for one in spans.named("torpor call preflight")}
        assert outcomes == {0: "ok", 1: "refused"}
        assert not spans.named("torpor call stage")

    rig.run(story)


@pytest.mark.parametrize(
    ("fault", "outcome"), [(Fault.HANG, "unanswered"), (Fault.DIE, "gone"), (Fault.RAISE, "failed")]
)
def test_a_call_that_gets_no_answer_says_so(rig: MemoryRig, spans: Spans, fault: Fault, outcome: str) -> None:
    async def story() -> None:
        rig.chat[1].fault("preflight", fault)
        await rig.do(TRACED)
        (call,) = [one for one in spans.named("torpor call preflight") if told(one, "rank") == 1]
        assert (told(call, "outcome"), call.status.status_code) == (outcome, StatusCode.ERROR)

    rig.run(story)


def test_one_that_is_refused_at_once_and_one_of_no_trace_have_spans_too(rig: MemoryRig, spans: Spans) -> None:
    async def story() -> None:
        await rig.do(asking(Kind.SLEEP, tags=("nothing",), traceparent=TRACEPARENT))
        refused = spans.one("torpor sleep")
        assert (parent_of(refused), told(refused, "code")) == (PARENT, "unknown_tag")
        await rig.do(WAKE)
        assert spans.one("torpor wake").parent is None

    rig.run(story)


def test_without_a_provider_nothing_is_made_and_the_context_is_passed_on(
    rig: MemoryRig, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        heard = heard_by(rig, monkeypatch)
        nobody = trace.ProxyTracerProvider()
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: nobody)
        assert (await rig.do(TRACED)).state is OperationState.SUCCEEDED
        assert not spans.all()
        assert {call.traceparent for call in heard} == {TRACEPARENT}, "ranks may be traced"

    rig.run(story)


def test_the_context_is_no_part_of_what_is_asked_for() -> None:
    """C4: else a retry, which has another span, would neither join nor find its key."""
    other = replace(TRACED, traceparent=TRACEPARENT.replace(PARENT, "b7ad6b7169203331"))
    assert fingerprint(SLEEP) == fingerprint(TRACED) == fingerprint(other)
    assert same_request(TRACED, other, ("weights",), {})
    assert request_from_json(request_to_json(TRACED)) == TRACED, (
        "whoever goes on with it, goes on with its trace"
    )
    assert OperationRequest(Kind.SLEEP, "chat").traceparent == ""
