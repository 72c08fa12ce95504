"""Sleeps by idleness, and room made for a wake (G6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_rig import CONFIG, RANK_BYTES, Rig, asking

from torpor.actors.config import DeviceConfig, GateConfig, ModelConfig
from torpor.actors.coordinator import Fault
from torpor.actors.messages import (
    DrainMode,
    Kind,
    MakeRoom,
    ModelState,
    OnConflict,
    Operation,
    OperationRequest,
    OperationState,
    Origin,
    RejectCode,
)

Fields = dict[str, object]


def rig_of(tmp_path: Path, **models: Fields) -> Rig:
    """Models, by fields of their ModelConfig, that just fill one device."""
    made = tuple(ModelConfig(name, **fields) for name, fields in models.items())  # type: ignore[arg-type]
    config = replace(CONFIG, models=made, device=DeviceConfig(host_capacity_bytes=len(made) * RANK_BYTES))
    return Rig(tmp_path / "journal.db", config)


def busy(rig: Rig, model: str, running: int = 1) -> None:
    rig.cluster.ranks[model][0].gate.running = running


def quiet(rig: Rig, model: str) -> None:
    gate = rig.cluster.ranks[model][0].gate
    gate.running, gate.quiet_since_s = 0, rig.loop_time()


async def state(rig: Rig, model: str) -> ModelState:
    return next(view.state for view in await rig.coordinator.models() if view.name == model)


async def asleep_after_s(rig: Rig, model: str, limit_s: float) -> float:
    began = rig.loop_time()
    while await state(rig, model) is not ModelState.ASLEEP:
        assert rig.loop_time() - began < limit_s, "still awake"
        await asyncio.sleep(0.1)
    return rig.loop_time() - began


def on_request(model: str, **fields: object) -> OperationRequest:
    wish = {"origin": Origin.REQUEST, "on_conflict": OnConflict.WAIT} | fields
    return asking(Kind.WAKE, model, **wish)


IDLE: Fields = {"sleep_after_idle_s": 60.0}


def test_a_model_that_nobody_asks_falls_asleep_and_is_no_hold(tmp_path: Path) -> None:
    """G6, with the restore modes that it is configured with."""
    rig = rig_of(tmp_path, chat=IDLE, other={})

    async def story() -> None:
        assert await asleep_after_s(rig, "chat", 70) == pytest.approx(60, abs=2)
        (operation,) = await rig.coordinator.operations("chat")
        assert (operation.origin, operation.state) == (Origin.IDLENESS, OperationState.SUCCEEDED)
        assert operation.restore == {"kv_cache": "none", "weights": "pinned"}
        (chat, other) = await rig.coordinator.models()
        assert not chat.hold
        await asyncio.sleep(1000)
        assert (other.state, await rig.coordinator.operations("other")) == (ModelState.AWAKE, [])
        assert len(await rig.coordinator.operations("chat")) == 1, "who sleeps is left alone"

    rig.run(story)


def test_requests_put_the_sleep_off(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, chat=IDLE)

    async def story() -> None:
        await asyncio.sleep(50)
        busy(rig, "chat")
        await asyncio.sleep(500)
        assert await state(rig, "chat") is ModelState.AWAKE
        quiet(rig, "chat")
        assert await asleep_after_s(rig, "chat", 70) == pytest.approx(60, abs=2)

    rig.run(story)


def test_a_request_that_comes_at_the_last_moment_is_not_drained_for_an_idle_sleep(tmp_path: Path) -> None:
    """It is decided at the gate, where the request is already."""
    rig = rig_of(tmp_path, chat=IDLE)

    async def story() -> None:
        def slip_in(moment: str, method: str, _: object) -> None:
            if (moment, method) == ("before", "preflight"):
                busy(rig, "chat")

        rig.cluster.ranks["chat"][0].on_call = slip_in
        await asyncio.sleep(65)
        (operation,) = await rig.coordinator.operations("chat")
        assert operation.code is RejectCode.NOT_IDLE
        assert rig.gate_open("chat") and operation.aborted_requests == 0

    rig.run(story)


def test_a_model_that_was_woken_is_idle_from_then_on_only(tmp_path: Path) -> None:
    """F22: the request that woke it has not come in yet."""
    rig = rig_of(tmp_path, chat=IDLE)

    async def story() -> None:
        await asleep_after_s(rig, "chat", 70)
        await asyncio.sleep(500)
        assert (await rig.do(on_request("chat"))).state is OperationState.SUCCEEDED
        assert await asleep_after_s(rig, "chat", 70) == pytest.approx(60, abs=2)

    rig.run(story)


def test_an_idle_sleep_that_is_refused_is_not_asked_for_at_every_turn(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, chat={"sleep_after_idle_s": 5.0})

    async def story() -> None:
        rig.cluster.ranks["chat"][0].fault("preflight", Fault.REFUSE, times=10)
        await asyncio.sleep(100)
        tried = await rig.coordinator.operations("chat")
        assert 3 <= len(tried) <= 4 and all(one.state is OperationState.REJECTED for one in tried)

    rig.run(story)


def test_idleness_counts_anew_after_the_coordinators_restart(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, chat=IDLE)

    async def story() -> None:
        await asyncio.sleep(55)
        await rig.restart()
        assert await asleep_after_s(rig, "chat", 70) == pytest.approx(60, abs=2)

    rig.run(story)


# --- room ---

ROOM: Fields = {"gate": GateConfig(make_room="idle")}
RigWhere = Callable[..., Rig]


@pytest.fixture(params=[False, True], ids=["the coordinator finds too little", "ranks find too little"])
def rig_where(request: pytest.FixtureRequest, tmp_path: Path) -> RigWhere:
    """As rig_of. Real ranks find out in preflight, when what is free is not promised to others."""

    def make(**models: Fields) -> Rig:
        rig = rig_of(tmp_path, **models)
        for ranks in rig.cluster.ranks.values():
            ranks[0].ledger.looks_ahead = request.param
        return rig

    return make


async def wake_with_neighbours(
    rig: Rig, prepare: Callable[[], None] = lambda: None, **fields: object
) -> Operation:
    """`late` goes to sleep, its place is taken, the others get old enough; then it wakes on request."""
    await rig.do(asking(Kind.SLEEP, "late", origin=Origin.IDLENESS))
    device = rig.cluster.devices[0]
    assert device.take("another process", device.free_bytes)
    await asyncio.sleep(100)
    prepare()
    return await rig.do(on_request("late", **fields))


def test_a_wake_on_request_puts_the_least_recently_used_idle_neighbour_to_sleep(rig_where: RigWhere) -> None:
    rig = rig_where(late=ROOM, young={}, old={})

    async def story() -> None:
        def prepare() -> None:
            quiet(rig, "young")

        woken = await wake_with_neighbours(rig, prepare)
        assert woken.state is OperationState.SUCCEEDED, woken
        assert [view.state for view in await rig.coordinator.models()] == [
            ModelState.AWAKE,
            ModelState.AWAKE,
            ModelState.ASLEEP,
        ]
        (sleep,) = await rig.coordinator.operations("old")
        assert (sleep.origin, sleep.restore["weights"]) == (Origin.ROOM, "pinned")
        assert not (await rig.coordinator.model("old")).hold
        assert rig.cluster.devices[0].free_bytes == 0

    rig.run(story)


@pytest.mark.parametrize("model", [{}, ROOM])
def test_only_who_is_configured_to_makes_room_on_request(rig_where: RigWhere, model: Fields) -> None:
    rig = rig_where(late=model, old={})

    async def story() -> None:
        woken = await wake_with_neighbours(rig)
        assert (woken.state is OperationState.SUCCEEDED) is bool(model)
        assert woken.code is (None if model else RejectCode.DEVICE_MEMORY)
        assert len(await rig.coordinator.operations("old")) == bool(model)

    rig.run(story)


@pytest.mark.parametrize("wish", [None, MakeRoom.IDLE])
def test_an_explicit_wake_makes_room_only_when_asked_to(rig_where: RigWhere, wish: MakeRoom | None) -> None:
    rig = rig_where(late=ROOM, old={})

    async def story() -> None:
        woken = await wake_with_neighbours(rig, origin=Origin.CALLER, make_room=wish)
        assert woken.code is (None if wish else RejectCode.DEVICE_MEMORY)
        assert (await state(rig, "old") is ModelState.ASLEEP) is (wish is not None)

    rig.run(story)


def test_a_plan_makes_no_room(rig_where: RigWhere) -> None:
    """C8"""
    rig = rig_where(late=ROOM, old={})

    async def story() -> None:
        planned = await wake_with_neighbours(rig, dry_run=True)
        assert planned.code is RejectCode.DEVICE_MEMORY
        assert await state(rig, "old") is ModelState.AWAKE

    rig.run(story)


def test_neighbours_that_run_something_or_have_just_been_woken_are_left_alone(rig_where: RigWhere) -> None:
    rig = rig_where(late=ROOM, runs={}, fresh={})

    async def story() -> None:
        await rig.do(asking(Kind.SLEEP, "late", origin=Origin.IDLENESS))
        await rig.do(asking(Kind.SLEEP, "fresh"))
        await asyncio.sleep(100)
        busy(rig, "runs")
        await rig.do(asking(Kind.WAKE, "fresh"))
        device = rig.cluster.devices[0]
        assert device.take("another process", device.free_bytes)
        assert (await rig.do(on_request("late"))).code is RejectCode.DEVICE_MEMORY
        busy(rig, "fresh")
        await asyncio.sleep(0.5)
        quiet(rig, "fresh")
        await asyncio.sleep(0.1)
        assert (await rig.do(on_request("late"))).state is OperationState.SUCCEEDED, "it has served since"
        assert await state(rig, "fresh") is ModelState.ASLEEP

    rig.run(story)


def test_nobody_is_put_to_sleep_where_it_would_not_suffice(rig_where: RigWhere) -> None:
    """One byte is missing even with all neighbours asleep."""
    rig = rig_where(late=ROOM, old={})

    async def story() -> None:
        ledger = rig.cluster.ranks["old"][0].ledger
        ledger.sizes = ledger.sizes | {"kv_cache": ledger.sizes["kv_cache"] - 1}
        rig.cluster.devices[0].give("old/0", 1)
        woken = await wake_with_neighbours(rig)
        assert woken.code is RejectCode.DEVICE_MEMORY
        assert await rig.coordinator.operations("old") == []

    rig.run(story)


def test_a_neighbour_that_cannot_sleep_is_passed_over(rig_where: RigWhere) -> None:
    rig = rig_where(late=ROOM, young={}, old={})

    async def story() -> None:
        def prepare() -> None:
            quiet(rig, "young")
            rig.cluster.ranks["old"][0].fault("preflight", Fault.REFUSE)

        assert (await wake_with_neighbours(rig, prepare)).state is OperationState.SUCCEEDED
        assert await state(rig, "young") is ModelState.ASLEEP

    rig.run(story)


def test_two_models_that_want_each_others_place_take_turns(rig_where: RigWhere) -> None:
    """F23: both ask for room again and again; each gets it in time, and neither is put to sleep before it served."""
    rig = rig_where(one=ROOM, other=ROOM)

    async def story() -> None:
        await rig.do(asking(Kind.SLEEP, "other", origin=Origin.IDLENESS))
        assert rig.cluster.devices[0].take("another process", RANK_BYTES)
        served = {"one": 0, "other": 0}

        async def ask(model: str) -> None:
            for _ in range(20):
                while not rig.gate_open(model):
                    await rig.do(on_request(model))
                    await asyncio.sleep(0.05)
                busy(rig, model)
                await asyncio.sleep(0.2)
                quiet(rig, model)
                served[model] += 1
                await asyncio.sleep(0.05)

        await asyncio.wait_for(asyncio.gather(ask("one"), ask("other")), 600)
        assert served == {"one": 20, "other": 20}

    rig.run(story)


def test_an_idle_sleep_is_refused_not_drained(rig_where: RigWhere) -> None:
    rig = rig_where(chat=IDLE)
    seen: list[DrainMode] = []

    async def story() -> None:
        leader = rig.cluster.ranks["chat"][0]
        drain = leader.drain

        async def spy(call, spec, timeout_s, lease_s):  # type: ignore[no-untyped-def]
            seen.append(spec.mode)
            return await drain(call, spec, timeout_s, lease_s)

        leader.drain = spy  # type: ignore[method-assign]
        await asleep_after_s(rig, "chat", 70)
        assert seen == [DrainMode.IF_IDLE]

    rig.run(story)
