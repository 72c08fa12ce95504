"""Holds are a set (G6): who leaves ends a hold of his own, and the model wakes when the last one goes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from coordinator_rig import KV_BYTES, SLEEP, WAKE, Rig, asking

from torpor.actors.messages import Kind, OnConflict, Operation, OperationRequest, OperationState, RejectCode

LEASED = asking(Kind.SLEEP, lease_s=10.0, on_conflict=OnConflict.WAIT)


def leave(sleep: Operation, **fields: object) -> OperationRequest:
    return asking(Kind.WAKE, sleep.model, releases=sleep.id, on_conflict=OnConflict.WAIT, **fields)


async def hold_both(rig: Rig, **fields: object) -> tuple[Operation, Operation]:
    """Two that ask for the same at the same moment."""
    wish = replace(LEASED, **fields)  # type: ignore[arg-type]
    one, other = await asyncio.gather(
        rig.do(replace(wish, caller="one")), rig.do(replace(wish, caller="other"))
    )
    assert {one.state, other.state} == {OperationState.SUCCEEDED} and one.id != other.id
    return one, other


def holders(rig: Rig) -> list[str]:
    return sorted(hold.by for hold in rig.coordinator._models["chat"].published.holds)


def test_the_first_to_leave_wakes_nothing_and_the_last_one_everything(rig: Rig) -> None:
    async def story() -> None:
        free = rig.free_bytes()
        one, other = await hold_both(rig)
        assert holders(rig) == ["one", "other"]
        asked = [list(rank.calls) for rank in rig.chat]
        left = await rig.do(leave(one))
        assert left.state is OperationState.SUCCEEDED and left.kind is Kind.WAKE
        assert holders(rig) == ["other"] and not rig.gate_open()
        assert [list(rank.calls) for rank in rig.chat] == asked, "no rank has to do with it"
        last = await rig.do(leave(other))
        assert last.state is OperationState.SUCCEEDED and len(last.ranks) == 3
        assert holders(rig) == [] and rig.gate_open() and rig.free_bytes() == free

    rig.run(story)


def test_the_last_one_to_leave_wakes_what_others_had_put_to_sleep_too(rig: Rig) -> None:
    async def story() -> None:
        caches = await rig.do(replace(LEASED, tags=("kv_cache",)))
        weights = await rig.do(replace(LEASED, tags=("weights",)))
        await rig.do(leave(caches, tags=("kv_cache",)))
        assert rig.parked() == [{"kv_cache", "weights"}] * 3, (
            "the other one's memory is not taken from it in part"
        )
        await rig.do(leave(weights, tags=("weights",)))
        assert rig.parked() == [set()] * 3 and rig.gate_open()

    rig.run(story)


def test_an_explicit_wake_ends_all_holds_and_who_leaves_later_wakes_and_ends_nothing(rig: Rig) -> None:
    async def story() -> None:
        one, other = await hold_both(rig)
        await rig.do(WAKE)
        assert holders(rig) == [] and rig.gate_open()
        assert (await rig.do(leave(one))).state is OperationState.SUCCEEDED
        await rig.do(replace(SLEEP, caller="third"))
        assert (await rig.do(leave(other))).state is OperationState.SUCCEEDED
        assert holders(rig) == ["third"] and not rig.gate_open()

    rig.run(story)


def test_who_leaves_twice_ends_no_other_hold(rig: Rig) -> None:
    """C1: repeating a request never harms."""

    async def story() -> None:
        one, _ = await hold_both(rig)
        for _ in range(2):
            assert (await rig.do(leave(one))).state is OperationState.SUCCEEDED
        assert holders(rig) == ["other"] and not rig.gate_open()

    rig.run(story)


def test_a_leaving_that_finds_no_memory_is_rejected_and_can_be_repeated(rig: Rig) -> None:
    """M4; the lease goes on, so that its end is still what was asked for."""

    async def story() -> None:
        sleep = await rig.do(replace(LEASED, caller="one"))
        device = rig.chat[1].device
        device.take("another process", device.free_bytes)
        refused = await rig.do(leave(sleep))
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.DEVICE_MEMORY)
        assert holders(rig) == ["one"] and (await rig.coordinator.renew(sleep.id)).lease_s == 10.0
        device.used.pop("another process")
        assert (await rig.do(leave(sleep))).state is OperationState.SUCCEEDED
        assert holders(rig) == [] and rig.gate_open()

    rig.run(story)


def test_the_plan_of_a_leaving_changes_nothing(rig: Rig) -> None:
    """C8."""

    async def story() -> None:
        one, other = await hold_both(rig, tags=("kv_cache",))
        assert (await rig.do(leave(one, dry_run=True))).needed_bytes is None
        assert holders(rig) == ["one", "other"]
        await rig.do(leave(one))
        assert (await rig.do(leave(other, dry_run=True))).needed_bytes == 3 * KV_BYTES
        assert holders(rig) == ["other"] and not rig.gate_open()

    rig.run(story)


@pytest.mark.parametrize("named", ["op-nobody", "of solo", "a wake"])
def test_what_is_no_sleep_of_the_model_cannot_be_left(rig: Rig, named: str) -> None:
    async def story() -> None:
        sleeps = {"of solo": await rig.do(asking(Kind.SLEEP, "solo")), "a wake": await rig.do(WAKE)}
        await rig.do(replace(LEASED, caller="one"))
        name = sleeps[named].id if named in sleeps else named
        refused = await rig.do(asking(Kind.WAKE, releases=name))
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.REFUSED)
        assert name in str(refused.reason) and holders(rig) == ["one"]

    rig.run(story)


def test_holds_that_were_left_stay_so_for_the_next_coordinator(rig: Rig) -> None:
    async def story() -> None:
        one, other = await hold_both(rig)
        await rig.do(leave(one))
        await rig.restart()
        assert holders(rig) == ["other"]
        rig.chat[1].delay_s["stage"] = 2.0
        await rig.coordinator.submit(leave(other))
        await asyncio.sleep(1.0)
        await rig.restart()  # before the decision: as if it had not been asked
        await asyncio.sleep(5.0)
        assert holders(rig) == ["other"] and not rig.gate_open()
        assert (await rig.do(leave(other))).state is OperationState.SUCCEEDED and rig.gate_open()

    rig.run(story)
