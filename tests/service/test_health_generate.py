"""GET /health_generate: a token in bounded time, or what keeps the model from making one (G6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from service_engine_rig import real_rig
from service_rig import Rig

from torpor.actors.messages import FinishReason, GateReason, GenerateRequest, Kind, OperationRequest, Origin
from torpor.service.gate.pulse import ONE_TOKEN, PROMPT


def hurry(rig: Rig, token_timeout_s: float) -> None:
    rig.app.state.context = replace(rig.app.state.context, token_timeout_s=token_timeout_s)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_real_engine_makes_a_token_and_is_as_idle_as_before(tmp_path: Path) -> None:
    async with real_rig(tmp_path) as (app, http, rank):
        before = (await rank.core.status()).idle_s
        assert (await http.get("/health_generate")).status_code == 200
        status = await rank.core.status()
        assert status.idle_s > before > 0
        assert status.live_sequences == 0
        asked = GenerateRequest("probe-1", token_ids=PROMPT, sampling=ONE_TOKEN, probe=True)
        events = [event async for event in app.state.context.inference.generate("chat", asked)]
        assert sum(len(event.token_ids) for event in events) == 1
        await http.post("/sleep")
        asleep = await http.get("/health_generate")
        assert (asleep.status_code, "asleep" in asleep.json()["detail"]) == (503, True)


async def test_one_token_is_asked_for_and_no_request_is_counted(rig: Rig) -> None:
    assert (await rig.http.get("/health_generate")).status_code == 200
    (asked,) = rig.inference.seen
    assert asked.probe and asked.sampling.max_tokens == 1
    assert rig.inference.running == set()
    assert "torpor_gate_admissions_total{" not in (await rig.http.get("/metrics")).text


async def test_it_wakes_nobody_also_where_the_gate_closes_under_it(rig: Rig) -> None:
    """The policy is `wake`."""
    sleep = OperationRequest(Kind.SLEEP, "chat", origin=Origin.IDLENESS)
    await rig.coordinator.wait((await rig.coordinator.submit(sleep)).id)
    asleep = await rig.http.get("/health_generate")
    assert (asleep.status_code, asleep.json()["code"]) == (503, "gate_closed")
    assert rig.inference.seen == []
    assert [one.kind for one in await rig.coordinator.operations("chat")] == [Kind.SLEEP]
    await rig.http.post("/wake")
    rig.inference.gate = lambda model: GateReason.SLEEPING
    closed = await rig.http.get("/health_generate")
    assert (closed.status_code, closed.json()["code"]) == (503, "gate_closed")
    assert "sleeping" in closed.json()["detail"]
    assert [one.kind for one in await rig.coordinator.operations("chat")] == [Kind.WAKE, Kind.SLEEP]


@pytest.mark.parametrize("what", ["silent", "full", "failing", "ended"])
async def test_a_model_that_makes_no_token_is_unhealthy_in_bounded_time(rig: Rig, what: str) -> None:
    hurry(rig, 0.1)
    match what:
        case "silent":
            rig.inference.delay_s = 60.0
        case "full":
            rig.inference.full = True
        case "failing":
            rig.inference.fail_after = 0
        case _:
            rig.inference.words, rig.inference.end = (), FinishReason.ABORT
    answer = await asyncio.wait_for(rig.http.get("/health_generate"), 5)
    assert (answer.status_code, answer.json()["code"]) == (503, "generation_failed"), answer.text
    assert rig.inference.running == set()
    assert (await rig.http.get("/is_sleeping")).json() == {"is_sleeping": False}


@pytest.mark.parametrize("full", [True, False])
async def test_a_busy_model_shows_by_its_other_requests_that_it_lives(rig: Rig, full: bool) -> None:
    """Nobody's probe waits for its turn behind all that was there before."""
    rig.inference.endless, rig.inference.delay_s = True, 0.05
    body = {"model": "chat", "prompt": "Hello"}
    talking = asyncio.create_task(rig.http.post("/v1/completions", json=body))
    await until(lambda: bool(rig.inference.running))
    rig.inference.full = full
    if not full:
        rig.inference.delay_s = 60.0  # of what comes later
        asyncio.get_running_loop().call_later(0.1, rig.app.state.context.inference.pulse.beat, "chat")
    assert (await asyncio.wait_for(rig.http.get("/health_generate"), 5)).status_code == 200
    talking.cancel()
