"""Requests at the leader: in through the gate, out through the streams, and never in silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from ranks.bench import Bench, make_bench, spec
from ranks.toys import ToyEngine

from torpor.actors.messages import Admission, FinishReason, GateReason, GenerateRequest, TokenEvent
from torpor.actors.ports import QueueFull
from torpor.actors.rank.core import Parts


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def until_idle(bench: Bench, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while bench.engine.running() or (await bench.status()).live_sequences:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_prompt_that_the_engine_refuses_is_invalid_and_takes_no_place(bench: Bench) -> None:
    request = bench.request(prompt="invalid")
    (reply,) = await bench.core.submit("front", [request])
    assert (reply.admission, reply.detail) == (
        Admission.INVALID,
        "this prompt is not to be had; send another",
    )
    assert (await bench.status()).live_sequences == 0
    assert await bench.admit(GenerateRequest(request.id, "hello")) == ["admitted"], "its id is free again"


async def test_a_request_whose_preparing_breaks_leaves_nothing_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(self: ToyEngine, asked: GenerateRequest) -> object:
        raise ZeroDivisionError("a bug")

    request = bench.request()
    with monkeypatch.context() as patch:
        patch.setattr(ToyEngine, "prepare", break_down)
        with pytest.raises(ZeroDivisionError):
            await bench.core.submit("front", [request])
    assert (await bench.status()).live_sequences == 0
    assert await bench.admit(GenerateRequest(request.id, "hello")) == ["admitted"], "its id is free again"


@pytest.mark.parametrize(
    ("error", "admission", "reason"),
    [
        (QueueFull, Admission.FULL, None),
        (RuntimeError, Admission.CLOSED, GateReason.FAILED),
    ],
)
async def test_an_engine_that_does_not_take_a_request_gives_its_place_back(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    admission: Admission,
    reason: GateReason | None,
) -> None:
    def refuse(self: ToyEngine, prepared: object) -> None:
        raise error("why not")

    monkeypatch.setattr(ToyEngine, "submit", refuse)
    (reply,) = await bench.core.submit("front", [bench.request()])
    assert (reply.admission, reply.gate_reason, reply.detail) == (admission, reason, "why not")
    assert (await bench.status()).live_sequences == 0


async def test_who_comes_first_is_admitted_first_however_long_its_preparing_takes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G3: the order of a queue is kept to the engine; who is refused on the way lets nobody overtake."""
    prepare, submit, seen = ToyEngine.prepare, ToyEngine.submit, []

    def slow(self: ToyEngine, asked: GenerateRequest) -> object:
        time.sleep(0.3 if asked.prompt == "slow" else 0)
        return prepare(self, asked)

    def spy(self: ToyEngine, prepared: GenerateRequest) -> None:
        seen.append(prepared.prompt)
        submit(self, prepared)

    monkeypatch.setattr(ToyEngine, "prepare", slow)
    monkeypatch.setattr(ToyEngine, "submit", spy)
    prompts = ["slow", "invalid", "quick", "slow", "last"]
    asked = [bench.request(prompt=prompt) for prompt in prompts]
    calls = [asyncio.create_task(bench.core.submit("front", [request])) for request in asked]
    await asyncio.sleep(0.05)
    calls[0].cancel()  # whoever called goes away; its request had come first all the same
    await asyncio.gather(*calls, return_exceptions=True)
    assert seen == ["quick", "slow", "last"] and calls[0].cancelled()


async def test_a_request_has_left_the_gate_when_its_end_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G2: who reads the end and asks for an idle model at once must not be told that the request still runs."""
    leader = bench.core._leader
    assert leader is not None
    inside = []
    deliver = leader.front_ends.deliver

    def spy(events: Sequence[TokenEvent]) -> None:
        inside.extend(leader.gate.running for event in events if event.finish_reason is not None)
        deliver(events)

    monkeypatch.setattr(leader.front_ends, "deliver", spy)
    request = bench.request()
    await bench.admit(request)
    await bench.read(request.id)
    assert inside == [0]


async def test_more_requests_than_the_engine_may_hold_are_told_that_it_is_full(device_name: str) -> None:
    bench = await make_bench(device_name)
    engine = spec(device_name).model.engine
    count = engine.max_running + engine.max_waiting
    replies = await bench.admit(*(bench.request(tokens=1_000_000) for _ in range(count + 3)))
    assert replies.count("admitted") == count
    assert replies.count("full") == 3
    await bench.core.detach("front")
    await until_idle(bench)
    await bench.core.close()


async def test_a_front_end_that_falls_silent_loses_its_requests(device_name: str) -> None:
    """G4: leases, not Ray, notice dead front ends."""
    clock = Clock()
    bench = await make_bench(device_name, parts=Parts(clock=clock))
    assert await bench.admit(bench.request(tokens=1_000_000)) == ["admitted"]
    clock.now = 9.9
    await asyncio.sleep(0.6)
    assert bench.engine.running() == 1
    clock.now = 10.1
    await until_idle(bench)
    await bench.core.close()


async def test_a_request_that_is_cancelled_while_it_comes_in_does_not_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel overtakes the submit: the engine does not know the request yet."""
    prepare = ToyEngine.prepare
    request = bench.request(tokens=1_000_000)
    loop = asyncio.get_running_loop()

    def cancel_meanwhile(self: ToyEngine, wanted: GenerateRequest) -> object:
        asyncio.run_coroutine_threadsafe(bench.core.cancel("front", [request.id]), loop).result(5)
        return prepare(self, wanted)

    monkeypatch.setattr(ToyEngine, "prepare", cancel_meanwhile)
    await bench.admit(request)
    events = await bench.read(request.id)
    assert events[-1].finish_reason is FinishReason.ABORT


async def test_a_dead_step_loop_closes_the_gate_and_ends_every_stream_with_an_error(bench: Bench) -> None:
    """G3, M6."""
    running = bench.request(tokens=1_000_000)
    await bench.admit(running)
    reading = asyncio.create_task(bench.read(running.id))
    await asyncio.sleep(0.05)
    await bench.admit(bench.request(prompt="die"))
    events = await reading
    assert events[-1].finish_reason is FinishReason.ERROR
    assert "told to die" in events[-1].error
    status = await bench.status()
    assert status.gate_reason is GateReason.FAILED
    assert "told to die" in status.error
    (reply,) = await bench.core.submit("front", [bench.request()])
    assert (reply.admission, reply.gate_reason) == (Admission.CLOSED, GateReason.FAILED)


async def test_a_rank_that_closes_ends_every_stream_with_an_error(device_name: str) -> None:
    bench = await make_bench(device_name)
    running = bench.request(tokens=1_000_000)
    await bench.admit(running)
    reading = asyncio.create_task(bench.read(running.id))
    await asyncio.sleep(0.05)
    await bench.core.close()
    assert (await reading)[-1].finish_reason is FinishReason.ERROR


async def test_a_model_that_is_lost_ends_its_streams_and_its_engine_computes_no_further(bench: Bench) -> None:
    """M6: another rank died; this one lives."""
    running = bench.request(tokens=1_000_000)
    await bench.admit(running)
    reading = asyncio.create_task(bench.read(running.id))
    await asyncio.sleep(0.05)
    bench.core.fail("rank 1 is gone")
    events = await reading
    assert (events[-1].finish_reason, events[-1].error) == (FinishReason.ERROR, "rank 1 is gone")
    await until_idle(bench)
    assert await bench.admit(bench.request()) == ["closed"]
