"""Holds and their leases (G6): who may end them, what becomes of them, and whose bytes they keep."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_rig import CONFIG, RANK_BYTES, SLEEP, WAKE, Rig, asking

from torpor.actors.config import DeviceConfig, ModelConfig
from torpor.actors.messages import (
    Kind,
    ModelState,
    OnConflict,
    OnExpiry,
    OperationState,
    Origin,
    RejectCode,
)
from torpor.actors.ports import NoLease

ON_REQUEST = asking(Kind.WAKE, origin=Origin.REQUEST, on_conflict=OnConflict.WAIT)
BY_IDLENESS = asking(Kind.SLEEP, origin=Origin.IDLENESS)
LEASED = asking(Kind.SLEEP, lease_s=10.0, caller="trainer")


async def hold_of(rig: Rig, model: str = "chat") -> list[tuple[str, float | None]]:
    """(by, lease) of each."""
    view = next(view for view in await rig.coordinator.models() if view.name == model)
    assert view.hold is bool(view.holds)
    return [(hold.by, hold.lease_s) for hold in view.holds]


def test_a_request_wakes_no_model_that_was_put_to_sleep_on_purpose(rig: Rig) -> None:
    """G6."""

    async def story() -> None:
        await rig.do(replace(SLEEP, caller="me"))
        assert await hold_of(rig) == [("me", None)]
        refused = await rig.do(ON_REQUEST)
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.HELD)
        assert "me" in (refused.reason or "") and not rig.gate_open()
        assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED
        assert await hold_of(rig) == [] and rig.gate_open()

    rig.run(story)


def test_a_request_wakes_a_model_that_sleeps_by_idleness_until_someone_asks_for_the_sleep(rig: Rig) -> None:
    """G6."""

    async def story() -> None:
        assert (await rig.do(BY_IDLENESS)).origin is Origin.IDLENESS
        assert await hold_of(rig) == []
        assert (await rig.do(ON_REQUEST)).state is OperationState.SUCCEEDED and rig.gate_open()
        await rig.do(BY_IDLENESS)
        await rig.do(replace(SLEEP, caller="me"))
        assert await hold_of(rig) == [("me", None)]
        assert (await rig.do(ON_REQUEST)).code is RejectCode.HELD

    rig.run(story)


def test_a_wake_on_request_that_waited_behind_an_explicit_sleep_is_refused(rig: Rig) -> None:
    async def story() -> None:
        sleeping = await rig.coordinator.submit(SLEEP)
        waking = await rig.coordinator.submit(ON_REQUEST)
        assert (await rig.coordinator.wait(waking.id)).code is RejectCode.HELD
        assert (await rig.coordinator.wait(sleeping.id)).state is OperationState.SUCCEEDED
        assert not rig.gate_open()

    rig.run(story)


def test_a_model_that_falls_asleep_on_purpose_shows_the_hold_at_once(rig: Rig) -> None:
    """So that nobody waits through a long drain to be refused after it."""

    async def story() -> None:
        rig.chat[0].gate.running = 1
        await rig.coordinator.submit(SLEEP)
        await asyncio.sleep(1)
        (view, _) = await rig.coordinator.models()
        assert (view.state, view.hold, view.holds) == (ModelState.SLEEPING, True, [])

    rig.run(story)


def test_what_nobody_asked_for_is_in_nobodys_way(rig: Rig) -> None:
    """An idle sleep runs: an explicit operation waits for it, and is no conflict."""

    async def story() -> None:
        rig.chat[0].delay_s["stage"] = 5
        idle = await rig.coordinator.submit(BY_IDLENESS)
        await asyncio.sleep(1)
        mine = await rig.coordinator.submit(SLEEP)
        assert mine.state is OperationState.RUNNING and mine.id != idle.id
        other = await rig.coordinator.submit(WAKE)
        assert other.code is RejectCode.CONFLICT, "people's operations are in each other's way"
        assert (await rig.coordinator.wait(mine.id)).state is OperationState.SUCCEEDED
        assert len(await hold_of(rig)) == 1

    rig.run(story)


@pytest.mark.parametrize("on_expiry", OnExpiry)
def test_a_lease_that_nobody_renews_ends_as_was_asked_for(rig: Rig, on_expiry: OnExpiry) -> None:
    async def story() -> None:
        held = await rig.do(replace(LEASED, on_expiry=on_expiry))
        for _ in range(3):
            await asyncio.sleep(8)
            renewed = await rig.coordinator.renew(held.id)
            assert (renewed.by, renewed.expires_at) == ("trainer", rig.now_s + 10)
        await asyncio.sleep(9)
        assert await hold_of(rig) == [("trainer", 10.0)], "renewed, it lasts its full length"
        await asyncio.sleep(3)
        woken = on_expiry is OnExpiry.WAKE
        assert await hold_of(rig) == ([] if woken else [("trainer", None)])
        assert rig.gate_open() is woken
        with pytest.raises(NoLease, match="sleep anew"):
            await rig.coordinator.renew(held.id)

    rig.run(story)


@pytest.mark.parametrize("on_expiry", OnExpiry)
def test_holds_survive_the_coordinator_and_their_leases_begin_anew(rig: Rig, on_expiry: OnExpiry) -> None:
    """While it was dead nobody could renew."""

    async def story() -> None:
        held = await rig.do(replace(LEASED, on_expiry=on_expiry))
        await asyncio.sleep(9)
        await rig.restart()
        assert await hold_of(rig) == [("trainer", 10.0)]
        await asyncio.sleep(9)
        await rig.coordinator.renew(held.id)
        await rig.restart()
        await asyncio.sleep(12)
        woken = on_expiry is OnExpiry.WAKE
        assert await hold_of(rig) == ([] if woken else [("trainer", None)])
        await rig.restart()
        assert await hold_of(rig) == ([] if woken else [("trainer", None)])
        assert rig.gate_open() is woken

    rig.run(story)


def test_a_lease_that_ends_wakes_nobody_while_others_hold(rig: Rig) -> None:
    async def story() -> None:
        await rig.do(replace(LEASED, on_expiry=OnExpiry.WAKE))
        other = await rig.do(replace(LEASED, caller="other", lease_s=30.0, on_expiry=OnExpiry.WAKE))
        await asyncio.sleep(15)
        assert await hold_of(rig) == [("other", 30.0)] and not rig.gate_open()
        await rig.coordinator.renew(other.id)
        await asyncio.sleep(31)
        assert rig.gate_open()

    rig.run(story)


def test_the_wake_at_a_leases_end_does_not_end_a_hold_that_has_come_before_it(rig: Rig) -> None:
    """The explicit sleep runs when the lease ends: the wake that waits behind it must not be carried out."""

    async def story() -> None:
        await rig.do(replace(LEASED, on_expiry=OnExpiry.WAKE))
        await asyncio.sleep(9.5)
        rig.chat[0].delay_s["stage"] = 5
        mine = await rig.coordinator.submit(replace(SLEEP, caller="me"))
        await asyncio.sleep(1)
        assert (await rig.coordinator.wait(mine.id)).state is OperationState.SUCCEEDED
        await asyncio.sleep(30)
        assert await hold_of(rig) == [("me", None)] and not rig.gate_open()

    rig.run(story)


def test_the_wake_at_a_leases_end_is_tried_until_there_is_memory(rig: Rig) -> None:
    async def story() -> None:
        await rig.do(replace(LEASED, on_expiry=OnExpiry.WAKE))
        device = rig.cluster.devices[0]
        assert device.take("another process", device.free_bytes)
        await asyncio.sleep(60)
        assert not rig.gate_open() and await hold_of(rig) == [("trainer", 10.0)]
        device.give("another process", RANK_BYTES)
        await asyncio.sleep(61)
        assert rig.gate_open()

    rig.run(story)


def three_on_one_device(tmp_path: Path) -> Rig:
    """Models a, b and c, whose memory just fills one device."""
    config = replace(
        CONFIG,
        models=tuple(ModelConfig(name) for name in "abc"),
        device=DeviceConfig(host_capacity_bytes=3 * RANK_BYTES),
    )
    return Rig(tmp_path / "three.db", config)


def test_bytes_freed_by_a_hold_are_not_used_for_the_automatic_wake_of_another_model(tmp_path: Path) -> None:
    """G6: the driver shows them free, and an explicit wake may have them."""
    rig = three_on_one_device(tmp_path)

    async def story() -> None:
        (device,) = rig.cluster.devices
        await rig.do(replace(BY_IDLENESS, model="b"))
        assert device.take("another process", RANK_BYTES)
        await rig.do(replace(SLEEP, model="a"))
        assert device.free_bytes == RANK_BYTES
        refused = await rig.do(replace(ON_REQUEST, model="b"))
        assert refused.code is RejectCode.DEVICE_MEMORY
        assert (refused.needed_bytes, refused.free_bytes) == (RANK_BYTES, 0)
        assert "holds" in (refused.reason or "")
        assert (await rig.do(replace(WAKE, model="b"))).state is OperationState.SUCCEEDED

    rig.run(story)


def test_bytes_that_a_holder_has_taken_up_are_not_kept_for_it_twice(tmp_path: Path) -> None:
    """G6: the trainer that asked for the hold uses them by now; the rest is for whoever wakes."""
    rig = three_on_one_device(tmp_path)

    async def story() -> None:
        (device,) = rig.cluster.devices
        await rig.do(replace(SLEEP, model="a"))
        await rig.do(replace(BY_IDLENESS, model="b"))
        assert device.take("trainer", RANK_BYTES)
        assert (await rig.do(replace(ON_REQUEST, model="b"))).state is OperationState.SUCCEEDED
        assert device.free_bytes == 0

    rig.run(story)


@pytest.mark.parametrize("room", [True, False])
def test_a_hold_keeps_its_bytes_besides_those_promised_to_an_explicit_wake(
    tmp_path: Path, room: bool
) -> None:
    """G6: three are free; one is held, one is promised, and one is left, or one byte less."""
    rig = three_on_one_device(tmp_path)

    async def story() -> None:
        (device,) = rig.cluster.devices
        await rig.do(replace(BY_IDLENESS, model="c"))
        if not room:
            assert device.take("another process", 1)
        await rig.do(replace(SLEEP, model="a"))
        await rig.do(replace(SLEEP, model="b"))
        rig.cluster.ranks["b"][0].delay_s["stage"] = 5
        waking = await rig.coordinator.submit(replace(WAKE, model="b"))
        await asyncio.sleep(1)
        by_request = await rig.do(replace(ON_REQUEST, model="c"))
        assert by_request.code is (None if room else RejectCode.DEVICE_MEMORY)
        assert (await rig.coordinator.wait(waking.id)).state is OperationState.SUCCEEDED

    rig.run(story)
