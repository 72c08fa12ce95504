"""Models that find no room to load: idle neighbours give way to them, as to a wake (gate.make_room)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from coordinator_rig import CONFIG, RANK_BYTES, Rig, asking
from coordinator_virtual_time import run
from test_idle import busy, on_request, quiet, state

from torpor.actors.config import DeviceConfig, GateConfig, ModelConfig
from torpor.actors.coordinator import Fault, MemoryMaker
from torpor.actors.coordinator.loading import Loading
from torpor.actors.messages import Kind, ModelState, OperationState, Origin
from torpor.actors.ports import NoDeviceMemory

YIELDING = GateConfig(make_room="idle")
FIRST = ModelConfig("first", gate=YIELDING)
LOAD_S = 100.0


def rig_of(folder: Path, models: float = 1.5, host_limit_bytes: int = 1 << 40) -> tuple[Rig, MemoryMaker]:
    """`first` is awake on a device with room for so many models."""
    device = DeviceConfig(host_capacity_bytes=int(models * RANK_BYTES))
    deadlines = replace(CONFIG.deadlines, load_s=LOAD_S)
    config = replace(CONFIG, models=(FIRST,), device=device, deadlines=deadlines)
    rig = Rig(folder / "journal.db", config, host_limit_bytes)
    return rig, rig.with_maker()


async def loaded(rig: Rig, *names: str) -> dict[str, ModelState]:
    """Their states when none is on its way any more."""
    while True:
        states = {name: await state(rig, name) for name in names}
        if not {ModelState.LOADING, ModelState.RECOVERING} & set(states.values()):
            return states
        await asyncio.sleep(0.1)


def test_an_idle_neighbour_gives_way_to_a_load_and_is_woken_by_a_request(tmp_path: Path) -> None:
    rig, maker = rig_of(tmp_path)

    async def story() -> None:
        await rig.coordinator.create(replace(FIRST, name="second"))
        assert await loaded(rig, "first", "second") == {
            "first": ModelState.ASLEEP,
            "second": ModelState.AWAKE,
        }
        (sleep,) = await rig.coordinator.operations("first")
        assert (sleep.kind, sleep.origin, sleep.state) == (Kind.SLEEP, Origin.ROOM, OperationState.SUCCEEDED)
        assert not (await rig.coordinator.model("first")).hold
        await asyncio.sleep(10)
        assert (await rig.do(on_request("first"))).state is OperationState.SUCCEEDED
        assert await state(rig, "second") is ModelState.ASLEEP
        assert maker.calls.count("load") == 3, "the first of first, and two of second"

    rig.run(story)


@pytest.mark.parametrize("yielding", [True, False])
def test_without_the_wish_or_anybody_who_could_yield_it_fails_with_the_reason(
    tmp_path: Path, yielding: bool
) -> None:
    rig, _ = rig_of(tmp_path)

    async def story() -> None:
        if yielding:
            await rig.do(asking(Kind.DELETE, "first"))
            assert rig.cluster.devices[0].take("another process", RANK_BYTES)
        began_s = rig.loop_time()
        await rig.coordinator.create(
            replace(FIRST, name="second", gate=YIELDING if yielding else GateConfig())
        )
        assert await loaded(rig, "second") == {"second": ModelState.FAILED}
        assert "needs" in (await rig.coordinator.model("second")).error
        assert rig.loop_time() - began_s < 5
        assert "second" not in rig.cluster.ranks, "ranks that serve nobody are ended"

    rig.run(story)


def test_ranks_that_do_not_say_where_they_sit_are_not_waited_for(tmp_path: Path) -> None:
    rig, maker = rig_of(tmp_path)
    maker.delay_s["load"] = 1.0

    async def story() -> None:
        began_s = rig.loop_time()
        await rig.coordinator.create(replace(FIRST, name="second"))
        await asyncio.sleep(0.5)
        rig.cluster.ranks["second"][0].fault("status", Fault.HANG, times=10)
        view = await rig.coordinator.watch("second", await rig.coordinator.watch("second", None, 0), 60)
        assert view.state is ModelState.FAILED and "needs" in view.error
        assert rig.loop_time() - began_s < 10

    rig.run(story)


def test_a_neighbour_that_is_waking_is_waited_for(tmp_path: Path) -> None:
    """It has told of no memory yet, and has it already."""
    rig, _ = rig_of(tmp_path)

    async def story() -> None:
        slept = await rig.do(asking(Kind.SLEEP, "first", origin=Origin.IDLENESS))
        assert slept.state is OperationState.SUCCEEDED
        stage = rig.cluster.ranks["first"][0].hold("commit")
        waking = asyncio.create_task(rig.do(on_request("first")))
        await stage.reached()
        await rig.coordinator.create(replace(FIRST, name="second"))
        await asyncio.sleep(5)
        stage.let_go()
        assert (await waking).state is OperationState.SUCCEEDED
        assert await loaded(rig, "first", "second") == {"first": "asleep", "second": "awake"}

    rig.run(story)


def test_a_neighbour_that_sleeps_in_part_is_not_waited_for(tmp_path: Path) -> None:
    """Its hold is somebody's; and a sleeping model may keep a little on its device for good."""
    rig, _ = rig_of(tmp_path, 1.1)

    async def story() -> None:
        await rig.do(asking(Kind.SLEEP, "first", tags=("kv_cache",)))
        began_s = rig.loop_time()
        await rig.coordinator.create(replace(FIRST, name="second"))
        assert (await loaded(rig, "second"))["second"] is ModelState.FAILED
        assert rig.loop_time() - began_s < 5

    rig.run(story)


def test_a_busy_neighbour_is_waited_for_until_the_load_has_no_time_left(tmp_path: Path) -> None:
    rig, _ = rig_of(tmp_path)

    async def story() -> None:
        busy(rig, "first")
        began_s = rig.loop_time()
        await rig.coordinator.create(replace(FIRST, name="second"))
        await rig.coordinator.create(replace(FIRST, name="third", gate=GateConfig(make_room="none")))
        assert (await loaded(rig, "third"))["third"] is ModelState.FAILED, "at once"
        await asyncio.sleep(60)
        assert await state(rig, "second") is ModelState.LOADING
        quiet(rig, "first")
        assert (await loaded(rig, "second"))["second"] is ModelState.AWAKE
        assert rig.loop_time() - began_s < 62
        busy(rig, "second")
        began_s = rig.loop_time()
        await rig.coordinator.create(replace(FIRST, name="fourth"))
        assert (await loaded(rig, "fourth"))["fourth"] is ModelState.FAILED
        assert rig.loop_time() - began_s == pytest.approx(LOAD_S, abs=5)
        assert await state(rig, "second") is ModelState.AWAKE

    rig.run(story)


@pytest.mark.parametrize("in_halves", [False, True])
def test_many_that_load_at_once_where_one_fits_all_load(tmp_path: Path, in_halves: bool) -> None:
    """Those that took memory from each other are tried one after the other."""
    rig, maker = rig_of(tmp_path, 1.75)
    maker.delay_s["load"], maker.in_halves = 3.0, in_halves

    async def story() -> None:
        names = [f"model-{number}" for number in range(4)]
        for name in names:
            await rig.coordinator.create(replace(FIRST, name=name))
        states = await loaded(rig, "first", *names)
        assert sorted(states.values()) == ["asleep"] * 4 + ["awake"], states
        for name in (*names, "first"):
            await asyncio.sleep(6)
            assert (await rig.do(on_request(name))).state is OperationState.SUCCEEDED

    rig.run(story)


def test_two_that_took_the_memory_from_each_other_need_nobody_to_give_way(tmp_path: Path) -> None:
    """Each has half of its memory when it finds no more: there is room for one of them, and for the busy neighbour."""
    rig, maker = rig_of(tmp_path, 2.4)
    maker.in_halves, maker.delay_s["load"], maker.delay_s["end"] = True, 3.0, 1.0

    async def story() -> None:
        busy(rig, "first")
        began_s = rig.loop_time()
        for name in ("second", "third"):
            await rig.coordinator.create(replace(FIRST, name=name))
        both = ("second", "third")
        while ModelState.AWAKE not in [await state(rig, name) for name in both]:
            assert rig.loop_time() - began_s < 8, "it waits for its neighbour, which is not in its way"
            await asyncio.sleep(0.1)
        states = await loaded(rig, "first", *both)
        assert (states["first"], {states[name] for name in both}) == ("awake", {"awake", "asleep"})

    rig.run(story)


def test_loads_at_different_devices_do_not_keep_each_other_from_asking_for_room() -> None:
    """Each is one of several that load at the same time, whose end may leave it room; soon somebody gives way to it."""
    given: set[str] = set()

    class Port:
        def __init__(self, device: str) -> None:
            self.device = device

        async def status(self) -> object:
            return SimpleNamespace(node="node-0", device_id=self.device)

    class Maker:
        async def load(self, model: ModelConfig) -> None:
            await asyncio.sleep(3 if model.name == "slow" else 1)
            if model.name not in {"slow", *given}:
                raise NoDeviceMemory("full")

        async def end(self, model: ModelConfig) -> None: ...

    class Neighbours:
        async def give_way(self, model: str, *_: object) -> bool:
            given.add(model)
            return True

    async def story() -> None:
        loading = Loading(Maker(), Neighbours(), replace(CONFIG.deadlines, load_s=LOAD_S))  # type: ignore[arg-type]

        async def load(name: str) -> None:
            async def make() -> list[Port]:
                return [Port(f"device of {name}")]

            runtime = SimpleNamespace(config=replace(FIRST, name=name))
            await loading.make_and_load(runtime, make)  # type: ignore[arg-type]

        began_s = asyncio.get_running_loop().time()
        await asyncio.gather(load("one"), load("two"), load("slow"))
        assert asyncio.get_running_loop().time() - began_s < 10

    run(story())


def test_a_load_that_failed_waits_for_one_that_runs_before_it_is_tried_again(tmp_path: Path) -> None:
    rig, maker = rig_of(tmp_path, 2.4)
    maker.in_halves, maker.delay_s["load"] = True, 3.0

    async def story() -> None:
        busy(rig, "first")
        await rig.coordinator.create(replace(FIRST, name="second"))
        await asyncio.sleep(2)
        await rig.coordinator.create(replace(FIRST, name="third"))
        states = await loaded(rig, "first", "second", "third")
        assert states == {"first": "awake", "second": "awake", "third": "asleep"}
        assert maker.calls.count("load") == 4, "of first one, of second two, and third was left to load"

    rig.run(story)


def test_a_neighbour_whose_sleep_is_refused_does_not_keep_others_from_yielding(tmp_path: Path) -> None:
    """Host memory for one model's weights: of two neighbours one sleeps, and then nobody can."""
    rig, _ = rig_of(tmp_path, 2.5, host_limit_bytes=120 << 20)

    async def story() -> None:
        await rig.coordinator.create(replace(FIRST, name="second"))
        assert (await loaded(rig, "second"))["second"] is ModelState.AWAKE
        await rig.coordinator.create(replace(FIRST, name="third"))
        states = await loaded(rig, "first", "second", "third")
        assert sorted(states.values()) == ["asleep", "awake", "awake"]
        await rig.coordinator.create(replace(FIRST, name="fourth"))
        states = await loaded(rig, "first", "second", "third", "fourth")
        assert sorted(states.values()) == ["asleep", "awake", "awake", "failed"]

    rig.run(story)


def test_a_recovery_finds_room_as_a_first_load_does(tmp_path: Path) -> None:
    """M6: one that died asleep needs its memory for a moment; its neighbour has it by then."""
    rig, _ = rig_of(tmp_path)

    async def story() -> None:
        await rig.coordinator.create(replace(FIRST, name="second"))
        await loaded(rig, "second")
        rig.cluster.ranks["first"][0].die()
        await rig.coordinator.fail("first", "rank 0 is gone")
        await asyncio.sleep(6)
        recovered = await rig.do(asking(Kind.RECOVER, "first"))
        assert recovered.state is OperationState.SUCCEEDED, recovered.reason
        assert (await state(rig, "first"), await state(rig, "second")) == (
            ModelState.ASLEEP,
            ModelState.ASLEEP,
        )

    rig.run(story)


def test_a_model_that_waits_for_room_can_be_deleted(tmp_path: Path) -> None:
    rig, _ = rig_of(tmp_path)

    async def story() -> None:
        busy(rig, "first")
        await rig.coordinator.create(replace(FIRST, name="second"))
        await asyncio.sleep(5)
        assert (await rig.do(asking(Kind.DELETE, "second"))).state is OperationState.SUCCEEDED
        assert "second" not in rig.cluster.ranks
        await rig.coordinator.create(replace(FIRST, name="third"))
        await asyncio.sleep(5)
        quiet(rig, "first")
        assert (await loaded(rig, "third"))["third"] is ModelState.AWAKE, "no turn was left taken"

    rig.run(story)
