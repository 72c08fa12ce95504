"""What becomes of requests at a closed gate, by policy (G3): refused, queued, or let in by a wake of their own (G6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_rig import GATE, Rig, app_over, client_of, config_of, make_rig

from torpor.actors.config import GateConfig
from torpor.actors.coordinator.memory import Fault
from torpor.actors.messages import Kind, Operation, OperationRequest, Origin
from torpor.actors.ports import ControlUnreachable

MakeRig = Callable[..., AbstractAsyncContextManager[Rig]]
QUEUE = replace(GATE, when_closed="queue")
BY_IDLENESS = OperationRequest(Kind.SLEEP, "chat", origin=Origin.IDLENESS)


@pytest.fixture
def rig_with(tmp_path: Path) -> MakeRig:
    @asynccontextmanager
    async def make(gate: GateConfig, models: dict[str, int] | None = None) -> AsyncIterator[Rig]:
        async with make_rig(tmp_path, models or {"chat": 1}, gate) as rig:
            yield rig

    return make


def ask(rig: Rig, text: str = "Hi", **fields: Any) -> asyncio.Task[httpx.Response]:
    body = {"model": "chat", "messages": [{"role": "user", "content": text}]} | fields
    return asyncio.create_task(rig.http.post("/v1/chat/completions", json=body))


async def ask_in_order(rig: Rig, count: int) -> list[asyncio.Task[httpx.Response]]:
    tasks = []
    for number in range(count):
        tasks.append(ask(rig, str(number)))
        await asyncio.sleep(0.005)
    return tasks


def texts(rig: Rig) -> list[object]:
    return [(seen.messages or ({},))[0].get("content") for seen in rig.inference.seen]


async def do(rig: Rig, wish: OperationRequest) -> Operation:
    return await rig.coordinator.wait((await rig.coordinator.submit(wish)).id)


async def wakes(rig: Rig, model: str = "chat") -> list[Operation]:
    return [one for one in await rig.coordinator.operations(model) if one.kind is Kind.WAKE]


async def until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about")


async def waiting(rig: Rig, count: int) -> None:
    line = f'torpor_queue_length{{model="chat"}} {count:.1f}'
    await until(lambda: line in rig.app.state.context.metrics.text().decode())


# --- wake ---


async def test_many_requests_to_a_model_that_sleeps_by_idleness_make_one_wake_and_are_served_in_order(
    rig: Rig,
) -> None:
    await do(rig, BY_IDLENESS)
    stage = rig.rank().hold("stage")
    tasks = await ask_in_order(rig, 20)
    await waiting(rig, 20)
    stage.let_go()
    answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200] * 20
    (wake,) = await wakes(rig)
    assert wake.origin is Origin.REQUEST
    served = texts(rig)[-20:]
    assert served == [str(number) for number in range(20)], "in the order of their arrival"
    metrics = (await rig.http.get("/metrics")).text
    assert 'torpor_queue_wait_seconds_count{model="chat"} 20.0' in metrics
    assert 'torpor_queue_length{model="chat"} 0.0' in metrics


async def test_several_front_ends_share_one_wake(rig: Rig) -> None:
    config = config_of({"chat": 1}, Path("unused"))
    await do(rig, BY_IDLENESS)
    stage = rig.rank().hold("stage")
    other = app_over(rig.coordinator, rig.inference, config, rig.log)
    async with client_of(other) as http:
        rigs = [rig, replace(rig, http=http, app=other)]
        tasks = [ask(rigs[number % 2]) for number in range(10)]
        for one in rigs:
            await waiting(one, 5)
        stage.let_go()
        answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200] * 10
    assert len(await wakes(rig)) == 1


async def test_a_request_wakes_a_sleep_that_was_opted_in(rig: Rig) -> None:
    """G6"""
    await rig.http.post("/sleep", json={"wake_on_request": True})
    assert (await ask(rig)).status_code == 200
    assert len(await wakes(rig)) == 1


async def test_a_hold_refuses_and_says_whose_it_is(rig: Rig) -> None:
    """G3, G6: under a hold, wake acts as reject."""
    await rig.http.post("/sleep", headers={"User-Agent": "trainer"})
    answer = await ask(rig)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "3")
    assert (answer.json()["code"], answer.json()["reason"]) == ("gate_closed", "asleep")
    assert "trainer" in answer.json()["detail"]
    assert await wakes(rig) == []


async def test_a_request_during_the_drain_of_a_sleep_on_purpose_is_refused_at_once(rig: Rig) -> None:
    rig.rank().gate.running = 1
    sleeping = asyncio.create_task(rig.http.post("/sleep"))
    await until(lambda: not rig.rank().gate.open)
    answer = await asyncio.wait_for(ask(rig), 1)
    assert (answer.status_code, answer.json()["reason"]) == (503, "draining")
    rig.rank().gate.running = 0
    assert (await sleeping).status_code == 200


async def test_a_request_during_an_explicit_wake_waits_for_it(rig: Rig) -> None:
    """The hold is being ended."""
    await rig.http.post("/sleep")
    stage = rig.rank().hold("stage")
    waking = asyncio.create_task(rig.http.post("/wake"))
    await stage.reached()
    task = ask(rig)
    await waiting(rig, 1)
    stage.let_go()
    assert (await task).status_code == 200
    assert (await waking).status_code == 200
    assert len(await wakes(rig)) == 1


async def test_listings_probes_and_metrics_wake_nobody_who_sleeps_by_idleness(rig: Rig) -> None:
    """G6"""
    await do(rig, BY_IDLENESS)
    paths = (
        "/livez",
        "/readyz",
        "/health",
        "/metrics",
        "/models",
        "/models/chat",
        "/v1/models",
        "/operations",
    )
    for path in (*paths, "/v1/models/chat", "/memory_status", "/docs"):
        assert (await rig.http.get(path)).status_code == 200, path
    await asyncio.sleep(0.05)
    assert (await rig.coordinator.model("chat")).state == "asleep"
    assert await wakes(rig) == []


@pytest.mark.parametrize("make_room", ["none", "idle"])
async def test_a_wake_without_memory_refuses_with_the_bytes_or_makes_room(
    rig_with: MakeRig, make_room: str
) -> None:
    async with rig_with(replace(GATE, make_room=make_room), {"chat": 1, "draft": 1}) as rig:
        await do(rig, BY_IDLENESS)
        device = rig.cluster.devices[0]
        device.take("another process", device.free_bytes)
        rig.rank("draft").gate.quiet_since_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.01)
        answer = await ask(rig)
        if make_room == "idle":
            assert answer.status_code == 200, answer.text
            assert (await rig.coordinator.model("draft")).state == "asleep"
        else:
            assert (answer.status_code, answer.json()["reason"]) == (503, "asleep")
            assert "needed 150.0 MiB, free 0.0 MiB" in answer.json()["detail"]
            assert (await rig.coordinator.model("draft")).state == "awake"


async def test_a_wake_that_finds_no_room_yet_is_tried_until_the_requests_time_is_over(
    rig_with: MakeRig,
) -> None:
    async with rig_with(replace(GATE, make_room="idle", queue_timeout_s=2.0)) as rig:
        await do(rig, BY_IDLENESS)
        device = rig.cluster.devices[0]
        taken = device.free_bytes
        device.take("another process", taken)
        answer = await ask(rig)
        assert (answer.status_code, answer.json()["code"]) == (503, "queue_timeout")
        assert "no room for its wake: needed" in answer.json()["detail"]
        in_time = ask(rig)
        await asyncio.sleep(0.2)
        device.give("another process", taken)
        assert (await in_time).status_code == 200


async def test_pauses_that_have_grown_leave_each_request_tries_in_its_own_time(
    rig_with: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.service.gate.keeper.RETRY_S", 100.0)
    monkeypatch.setattr("torpor.service.gate.keeper.LONGEST_RETRY_S", 100.0)
    async with rig_with(replace(GATE, make_room="idle", queue_timeout_s=4.0)) as rig:
        await do(rig, BY_IDLENESS)
        device = rig.cluster.devices[0]
        taken = device.free_bytes
        device.take("another process", taken)
        task = ask(rig)
        while not [one for one in await wakes(rig) if one.state == "rejected"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        device.give("another process", taken)
        assert (await task).status_code == 200


# --- queue ---


async def test_queued_requests_are_served_in_order_when_the_model_wakes(rig_with: MakeRig) -> None:
    async with rig_with(QUEUE) as rig:
        await rig.http.post("/sleep")
        tasks = await ask_in_order(rig, 10)
        await waiting(rig, 10)
        assert (await rig.http.post("/wake")).status_code == 200
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 10
        assert texts(rig)[-10:] == [str(number) for number in range(10)]
        assert len(await wakes(rig)) == 1, "the explicit one"


async def test_a_full_queue_refuses_and_a_client_that_leaves_frees_its_place(rig_with: MakeRig) -> None:
    """G3, G4"""
    async with rig_with(replace(QUEUE, queue_limit=2)) as rig:
        await rig.http.post("/sleep")
        first, second = await ask_in_order(rig, 2)
        await waiting(rig, 2)
        answer = await ask(rig)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "3")
        assert (answer.json()["code"], answer.json()["reason"]) == ("queue_full", "asleep")
        first.cancel()
        await waiting(rig, 1)
        third = ask(rig, "third")
        await waiting(rig, 2)
        await rig.http.post("/wake")
        assert [(await one).status_code for one in (second, third)] == [200, 200]
        assert texts(rig)[-2:] == ["1", "third"]


async def test_who_waits_too_long_is_told_why(rig_with: MakeRig) -> None:
    async with rig_with(replace(QUEUE, queue_timeout_s=0.2)) as rig:
        await rig.http.post("/sleep")
        answer = await asyncio.wait_for(ask(rig, stream=True), 2)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "3")
        assert (answer.json()["code"], answer.json()["reason"]) == ("queue_timeout", "asleep")
        await waiting(rig, 0)


async def test_a_rejecting_model_keeps_nobody_waiting(rig_with: MakeRig) -> None:
    async with rig_with(replace(GATE, when_closed="reject")) as rig:
        await do(rig, BY_IDLENESS)
        answer = await asyncio.wait_for(ask(rig), 1)
        assert (answer.status_code, answer.json()["code"]) == (503, "gate_closed")
        assert await wakes(rig) == []


async def test_a_gate_that_is_closed_though_the_coordinator_calls_it_open_is_tried_again(rig: Rig) -> None:
    """E.g. for the moment between a leader's closing and the news of it; not in a busy loop."""
    asked = 0

    def gate(model: str) -> str | None:
        nonlocal asked
        asked += 1
        return "draining" if asked <= 5 else None

    rig.inference.gate = gate
    began = asyncio.get_running_loop().time()
    assert (await ask(rig)).status_code == 200
    assert 0.2 < asyncio.get_running_loop().time() - began < 3


async def test_a_failed_model_is_waited_for_briefly_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.service.gate.keeper.FAILED_PATIENCE_S", 0.3)
    monkeypatch.setattr("torpor.service.gate.keeper.LOOK_S", 0.1)
    rig.rank().die()
    await rig.coordinator.fail("chat", "rank 0 is gone")
    answer = await asyncio.wait_for(ask(rig), 3)
    assert (answer.status_code, answer.json()["reason"]) == (503, "failed")
    assert "rank 0 is gone" in answer.json()["detail"]


async def test_a_model_that_fails_in_its_wake_is_waited_for_as_any_failed_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recovery may come within the request's time, and then it is woken again."""
    monkeypatch.setattr("torpor.service.gate.keeper.FAILED_PATIENCE_S", 0.5)
    monkeypatch.setattr("torpor.service.gate.keeper.LOOK_S", 0.1)
    await do(rig, BY_IDLENESS)
    rig.rank().fault("stage", Fault.DIE)
    began = asyncio.get_running_loop().time()
    answer = await asyncio.wait_for(ask(rig), 10)
    assert (answer.status_code, answer.json()["reason"]) == (503, "failed"), answer.text
    assert asyncio.get_running_loop().time() - began > 0.5
    assert len(await wakes(rig)) == 1


async def test_a_coordinator_that_is_away_for_a_while_costs_nobody_its_place(
    rig_with: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig_with(QUEUE) as rig:
        await rig.http.post("/sleep")
        watch = rig.coordinator.watch
        away = True

        async def unsteady(*arguments: Any) -> Any:
            if away:
                raise ControlUnreachable("no coordinator")
            return await watch(*arguments)

        monkeypatch.setattr(rig.coordinator, "watch", unsteady)
        task = ask(rig)
        await waiting(rig, 1)
        await rig.http.post("/wake")
        await asyncio.sleep(0.1)
        assert not task.done()
        away = False
        assert (await task).status_code == 200


async def test_whatever_goes_wrong_with_the_waiting_is_told_to_who_waits(
    rig_with: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G3: no request ends in silence."""
    async with rig_with(QUEUE) as rig:
        await rig.http.post("/sleep")

        async def broken(*arguments: Any) -> Any:
            raise ZeroDivisionError("a fault of ours")

        monkeypatch.setattr(rig.coordinator, "watch", broken)
        answer = await asyncio.wait_for(ask(rig), 2)
        assert (answer.status_code, answer.json()["code"]) == (500, "internal")


async def test_a_front_end_that_ends_refuses_who_waits(rig_with: MakeRig) -> None:
    async with rig_with(QUEUE) as rig:
        await rig.http.post("/sleep")
        tasks = await ask_in_order(rig, 3)
        await waiting(rig, 3)
        await rig.app.state.context.inference.close()
        for answer in await asyncio.gather(*tasks):
            assert (answer.status_code, answer.json()["reason"]) == (503, "ending")


async def test_a_silent_coordinator_keeps_no_request_from_an_open_gate(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: what is known of gates is asked anew beside the requests, not before them."""
    asked = asyncio.Event()

    async def never() -> Any:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("torpor.service.gate.gates.FRESH_S", 0.0)
    monkeypatch.setattr(rig.coordinator, "describe", never)
    for _ in range(2):
        assert (await asyncio.wait_for(ask(rig), 2)).status_code == 200
    assert asked.is_set()


async def test_a_gate_that_was_configured_anew_counts_for_whoever_comes_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.service.gate.gates.FRESH_S", 0.0)
    config = await rig.coordinator.describe()
    await rig.coordinator.adapt(replace(config.models[0], gate=replace(GATE, when_closed="reject")))
    assert (await ask(rig)).status_code == 200
    await do(rig, BY_IDLENESS)
    answer = await asyncio.wait_for(ask(rig), 2)
    assert (answer.status_code, answer.json()["code"]) == (503, "gate_closed")
    assert await wakes(rig) == []


async def test_names_of_models_that_are_not_there_are_not_collected(rig: Rig) -> None:
    for number in range(5):
        assert (await ask(rig, model=f"nobody-{number}")).status_code == 404
    assert not rig.app.state.context.inference._doors
