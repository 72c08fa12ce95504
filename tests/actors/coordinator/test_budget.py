"""Bytes that are promised once only, on devices and on hosts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from coordinator_rig import RANK_BYTES, SLEEP, WEIGHTS_BYTES, Rig, asking

from torpor.actors.coordinator.budget import Budget, Need, Place
from torpor.actors.limits import host_limit_bytes
from torpor.actors.messages import Kind, OperationState, RejectCode, RestoreMode

GPU, HOST = Place("node-0", "gpu-0"), Place("node-0")


def test_what_one_operation_was_promised_no_other_gets() -> None:
    budget = Budget()
    assert budget.reserve("a", [Need(GPU, 60, 100)]) is None
    refusal = budget.reserve("b", [Need(GPU, 60, 100)])
    assert refusal is not None and refusal.code is RejectCode.DEVICE_MEMORY
    assert (refusal.needed_bytes, refusal.free_bytes) == (60, 40)
    assert budget.reserved_bytes() == 60
    budget.release("a", used=False)
    assert budget.reserved_bytes() == 0 and budget.reserve("b", [Need(GPU, 100, 100)]) is None


def test_a_promise_that_is_taken_up_already_is_not_counted_twice() -> None:
    budget = Budget()
    budget.reserve("a", [Need(GPU, 60, 100)])
    # The device shows 40 free now: a has mapped its bytes, and still holds its promise.
    assert budget.reserve("b", [Need(GPU, 40, 40)]) is None
    budget.release("a", used=True)
    refusal = budget.reserve("c", [Need(GPU, 1, 40)])
    assert refusal is not None and refusal.free_bytes == 0, "b's 40 are still to come"


def test_memory_that_others_take_is_gone_for_everybody() -> None:
    budget = Budget()
    budget.reserve("a", [Need(GPU, 60, 100)])
    refusal = budget.reserve("b", [Need(GPU, 30, 20)])
    assert refusal is not None and refusal.free_bytes == 20


def test_ranks_that_share_a_device_are_counted_together_and_nothing_is_promised_in_part() -> None:
    budget = Budget()
    refusal = budget.reserve("a", [Need(HOST, 10, 1000), Need(GPU, 60, 100), Need(GPU, 60, 100)])
    assert refusal is not None and refusal.needed_bytes == 120
    assert budget.reserved_bytes() == 0


def test_bytes_that_a_sleep_gives_back_are_free_for_others() -> None:
    budget = Budget()
    budget.reserve("a", [Need(GPU, 60, 100)])
    budget.gave_back(GPU, 50)
    assert budget.reserve("b", [Need(GPU, 90, 90)]) is None, "a has taken its 60 of 150"


@pytest.mark.parametrize(
    ("configured", "files", "expected"),
    [
        (77, {"/sys/fs/cgroup/memory.max": "1000"}, 77),
        (None, {"/sys/fs/cgroup/memory.max": "1000\n", "/proc/meminfo": "MemTotal: 100 kB\n"}, 900),
        (None, {"/sys/fs/cgroup/memory.max": "max\n", "/proc/meminfo": "X: 1 kB\nMemTotal: 100 kB\n"}, 92160),
        (None, {"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 1 << 60),
        (
            None,
            {"/sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n", "/proc/meminfo": "MemTotal: 9 kB\n"},
            4500,
        ),
        (None, {}, 1 << 60),
    ],
)
def test_the_host_s_limit_is_the_lowest_that_is_known(
    configured: int | None, files: dict[str, str], expected: int
) -> None:
    assert host_limit_bytes(configured, files.get) == expected


def test_the_host_s_limit_of_this_machine_is_read() -> None:
    assert 0 < host_limit_bytes(None) < 1 << 60


def test_two_models_woken_at_once_on_one_device_do_not_take_the_same_bytes(rig: Rig) -> None:
    """F23, C4."""

    async def story() -> None:
        await rig.do(SLEEP)
        await rig.do(asking(Kind.SLEEP, "solo"))
        device = rig.cluster.devices[0]
        device.take("another process", device.free_bytes - RANK_BYTES)
        for rank in (*rig.chat, rig.solo):
            rank.delay_s = {"stage": 1.0}
        outcomes = await asyncio.gather(rig.do(asking(Kind.WAKE)), rig.do(asking(Kind.WAKE, "solo")))
        assert sorted(o.state for o in outcomes) == [OperationState.REJECTED, OperationState.SUCCEEDED]
        loser = next(o for o in outcomes if o.state is OperationState.REJECTED)
        assert loser.code is RejectCode.DEVICE_MEMORY
        assert (loser.needed_bytes, loser.free_bytes) == (RANK_BYTES, 0)
        assert rig.coordinator.reserved_bytes() == 0

    rig.run(story)


def test_two_models_that_both_fit_wake_at_once(rig: Rig) -> None:
    async def story() -> None:
        await rig.do(SLEEP)
        await rig.do(asking(Kind.SLEEP, "solo"))
        for rank in (*rig.chat, rig.solo):
            rank.delay_s = {"stage": 1.0, "commit": 1.0, "preflight": 0.9 if rank is rig.solo else 0.0}
        outcomes = await asyncio.gather(rig.do(asking(Kind.WAKE)), rig.do(asking(Kind.WAKE, "solo")))
        assert [o.state for o in outcomes] == [OperationState.SUCCEEDED] * 2, [o.reason for o in outcomes]
        assert rig.gate_open("chat") and rig.gate_open("solo")

    rig.run(story)


def test_a_sleep_that_would_keep_more_than_the_node_may_is_rejected(tmp_path: Path) -> None:
    """F18, M8. The limit counts what sleeping models keep already."""
    rig = Rig(tmp_path / "journal.db", host_limit_bytes=3 * WEIGHTS_BYTES)

    async def story() -> None:
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED
        free = rig.free_bytes()
        refused = await rig.do(asking(Kind.SLEEP, "solo"))
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.HOST_MEMORY)
        assert (refused.needed_bytes, refused.free_bytes) == (WEIGHTS_BYTES, 0)
        assert rig.free_bytes() == free and rig.gate_open("solo")
        await rig.do(asking(Kind.WAKE))
        assert (await rig.do(asking(Kind.SLEEP, "solo"))).state is OperationState.SUCCEEDED
        nothing_kept = asking(Kind.SLEEP, restore={"weights": RestoreMode.NONE})
        assert (await rig.do(nothing_kept)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_operations_on_a_shared_device_take_turns(rig: Rig) -> None:
    """C4."""

    async def story() -> None:
        inside: set[str] = set()
        overlaps: list[set[str]] = []

        def watch(moment: str, method: str, rank: object) -> None:
            model = rank.model  # type: ignore[attr-defined]
            if method == "stage" and moment == "before":
                inside.add(model)
                overlaps.append(set(inside))
            elif method == "publish" and moment == "after" and rank.rank == 0:  # type: ignore[attr-defined]
                inside.discard(model)

        for rank in (*rig.chat, rig.solo):
            rank.on_call, rank.delay_s = watch, {"stage": 1.0}
        outcomes = await asyncio.gather(rig.do(SLEEP), rig.do(asking(Kind.SLEEP, "solo")))
        assert [o.state for o in outcomes] == [OperationState.SUCCEEDED] * 2
        assert all(len(models) == 1 for models in overlaps), overlaps

    rig.run(story)
