"""The way of an operation when nothing goes wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from coordinator_rig import KV_BYTES, RANK_BYTES, SLEEP, WAKE, WEIGHTS_BYTES, Rig, asking

from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    GateReason,
    Kind,
    ModelState,
    OnDiscard,
    OperationState,
    RankOutcome,
    RejectCode,
    RestoreMode,
)


def test_a_sleep_frees_every_rank_and_a_wake_brings_it_back(rig: Rig) -> None:
    async def story() -> None:
        before = rig.free_bytes()
        asleep = await rig.do(SLEEP)
        assert asleep.state is OperationState.SUCCEEDED
        assert [(rank.outcome, rank.freed_bytes) for rank in asleep.ranks] == [
            (RankOutcome.COMMITTED, RANK_BYTES)
        ] * 3
        assert [rank.kept_bytes for rank in asleep.ranks] == [WEIGHTS_BYTES] * 3
        assert rig.free_bytes() == [free + RANK_BYTES for free in before]
        view = await rig.coordinator.model("chat")
        assert (view.state, view.gate_open, view.gate_reason) == (ModelState.ASLEEP, False, GateReason.ASLEEP)
        assert view.parked_tags == ["kv_cache", "weights"] and view.hold
        awake = await rig.do(WAKE)
        assert awake.state is OperationState.SUCCEEDED
        view = await rig.coordinator.model("chat")
        assert (view.state, view.gate_open, view.parked_tags, view.hold) == (
            ModelState.AWAKE,
            True,
            [],
            False,
        )
        rig.assert_untouched(before)

    rig.run(story)


def test_a_second_sleep_tells_what_it_has_saved_and_not_what_was_kept_before(rig: Rig) -> None:
    async def story() -> None:
        await rig.do(replace(SLEEP, tags=("weights",)))
        rest = await rig.do(replace(SLEEP, tags=("kv_cache",), restore={"kv_cache": RestoreMode.NONE}))
        assert [rank.kept_bytes for rank in rest.ranks] == [0] * 3

    rig.run(story)


Seen = tuple[str, str, int]  # moment, method, rank


def watched(rig: Rig) -> list[Seen]:
    """What chat's ranks are called from now on, each slower than the others in something."""
    order: list[Seen] = []
    for rank in rig.chat:
        rank.on_call = lambda moment, method, rank: order.append((moment, method, rank.rank))
        slowness = {"preflight": rank.rank * 1.0, "stage": 2.0 - rank.rank, "commit": rank.rank * 0.5}
        rank.delay_s = {**slowness, "publish": 0.1}
    return order


def assert_one_after_the_other(order: list[Seen], *methods: str) -> None:
    """No call of a phase begins before the last one of the phase before it has been answered by all three ranks."""
    called = [method for _, method, _ in order]
    assert list(dict.fromkeys(called)) == list(methods)
    for method in methods:
        at = [index for index, name in enumerate(called) if name == method]
        asked = 1 if method == "drain" else 3
        assert at == list(range(at[0], at[0] + 2 * asked)), f"{method} overlaps another phase"


def test_all_ranks_finish_a_phase_before_any_starts_the_next_and_an_opening_leader_publishes_last(
    rig: Rig,
) -> None:
    async def story() -> None:
        order = watched(rig)
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED
        assert_one_after_the_other(order, "preflight", "drain", "stage", "commit", "publish")
        assert [rank for _, method, rank in order if method == "drain"] == [0, 0]
        order.clear()
        assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED
        assert_one_after_the_other(order, "preflight", "stage", "commit", "publish")
        assert order[-2:] == [("before", "publish", 0), ("after", "publish", 0)]

    rig.run(story)


def test_where_the_gate_stays_closed_all_ranks_publish_at_once(rig: Rig) -> None:
    """C3: also after a wake of some tags."""

    async def story() -> None:
        order = watched(rig)
        for request in (SLEEP, asking(Kind.WAKE, tags=("weights",)), asking(Kind.PAUSE)):
            order.clear()
            assert (await rig.do(request)).state is OperationState.SUCCEEDED
            published = [entry for entry in order if entry[1] == "publish"]
            assert [moment for moment, _, _ in published[:3]] == ["before"] * 3, request.kind

    rig.run(story)


def test_an_operation_asks_each_rank_once_a_phase_and_nothing_besides(rig: Rig) -> None:
    """P7: how a rank is comes with its plan and with its end."""

    async def story() -> None:
        for request, phases in (
            (SLEEP, ["preflight", "drain", "stage", "commit", "publish"]),
            (WAKE, ["preflight", "stage", "commit", "publish"]),
        ):
            for rank in rig.chat:
                rank.calls.clear()
            assert (await rig.do(request)).state is OperationState.SUCCEEDED
            for rank in rig.chat:
                asked = [phase for phase in phases if phase != "drain" or rank.rank == 0]
                assert rank.calls == asked, f"{request.kind} at rank {rank.rank}"

    rig.run(story)


def test_a_wake_drains_nothing(rig: Rig) -> None:
    async def story() -> None:
        await rig.do(SLEEP)
        rig.chat[0].calls.clear()
        await rig.do(WAKE)
        assert "drain" not in rig.chat[0].calls

    rig.run(story)


def test_repeated_sleeps_and_wakes_succeed_and_change_nothing(rig: Rig) -> None:
    """C1."""

    async def story() -> None:
        before = rig.free_bytes()
        generation = (await rig.coordinator.model("chat")).generation
        assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED
        assert (await rig.coordinator.model("chat")).generation == generation
        assert "stage" not in rig.chat[0].calls, "a wake of an awake model must not close the gate"
        for _ in range(2):
            operation = await rig.do(SLEEP)
            assert operation.state is OperationState.SUCCEEDED
            assert rig.free_bytes() == [free + RANK_BYTES for free in before]
        assert (await rig.coordinator.model("chat")).generation == generation + 1
        for _ in range(2):
            assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED
        rig.assert_untouched(before)

    rig.run(story)


def test_the_gate_stays_closed_until_nothing_is_parked(rig: Rig) -> None:
    """C2, C3."""

    async def story() -> None:
        assert (await rig.do(asking(Kind.SLEEP, tags=("kv_cache",)))).state is OperationState.SUCCEEDED
        assert rig.parked() == [{"kv_cache"}] * 3
        assert (await rig.do(asking(Kind.SLEEP, tags=("weights",)))).state is OperationState.SUCCEEDED
        assert rig.parked() == [{"kv_cache", "weights"}] * 3
        assert (await rig.do(asking(Kind.WAKE, tags=("weights",)))).state is OperationState.SUCCEEDED
        view = await rig.coordinator.model("chat")
        assert (view.state, view.parked_tags, view.gate_open) == (ModelState.ASLEEP, ["kv_cache"], False)
        assert view.hold and not rig.gate_open()
        await rig.do(asking(Kind.WAKE, tags=("kv_cache",)))
        assert rig.gate_open() and not (await rig.coordinator.model("chat")).hold

    rig.run(story)


def test_a_dry_run_tells_the_bytes_and_touches_nothing(rig: Rig) -> None:
    """C8."""

    async def story() -> None:
        before = rig.free_bytes()
        plan = await rig.do(asking(Kind.SLEEP, dry_run=True))
        assert plan.state is OperationState.SUCCEEDED and plan.dry_run
        assert [rank.freed_bytes for rank in plan.ranks] == [RANK_BYTES] * 3
        assert [rank.kept_bytes for rank in plan.ranks] == [WEIGHTS_BYTES] * 3
        assert {rank.outcome for rank in plan.ranks} == {RankOutcome.PREPARED}
        assert not {"drain", "stage", "commit"} & {call for rank in rig.chat for call in rank.calls}
        rig.assert_untouched(before)
        assert (await rig.coordinator.model("chat")).state is ModelState.AWAKE
        await rig.do(SLEEP)
        plan = await rig.do(asking(Kind.WAKE, dry_run=True))
        assert (plan.state, plan.needed_bytes) == (OperationState.SUCCEEDED, 3 * RANK_BYTES)
        assert rig.parked() == [{"kv_cache", "weights"}] * 3

    rig.run(story)


def test_weights_that_woke_without_contents_keep_the_gate_closed(rig: Rig) -> None:
    """C9, F27. A KV cache without contents does not."""

    async def story() -> None:
        await rig.do(asking(Kind.SLEEP, restore={"weights": RestoreMode.NONE, "kv_cache": RestoreMode.NONE}))
        assert (await rig.do(asking(Kind.WAKE, on_discard=OnDiscard.WAIT))).state is OperationState.SUCCEEDED
        for view in (await rig.coordinator.model("chat"), (await rig.coordinator.models())[0]):
            assert view.state is ModelState.AWAKE and view.parked_tags == []
            assert (view.gate_open, view.gate_reason) == (False, GateReason.CONTENTS_UNDEFINED)
        assert not rig.gate_open()

    rig.run(story)


def test_a_drain_out_of_time_is_rejected_and_the_gate_reopens(rig: Rig) -> None:
    async def story() -> None:
        before = rig.free_bytes()
        rig.chat[0].gate.running = 3
        operation = await rig.do(asking(Kind.SLEEP, drain=DrainSpec(timeout_s=5.0)))
        assert (operation.state, operation.code) == (OperationState.REJECTED, RejectCode.DRAIN_TIMEOUT)
        assert "3 requests still ran" in (operation.reason or "")
        rig.assert_untouched(before)
        operation = await rig.do(asking(Kind.SLEEP, drain=DrainSpec(mode=DrainMode.ABORT)))
        assert (operation.state, operation.aborted_requests) == (OperationState.SUCCEEDED, 3)

    rig.run(story)


def test_a_sleep_that_wants_an_idle_model_is_refused_at_once_while_anything_runs(rig: Rig) -> None:
    """G2: the gate was never closed for it."""

    async def story() -> None:
        before, began_s = rig.free_bytes(), asyncio.get_running_loop().time()
        rig.chat[0].gate.running = 1
        idle = asking(Kind.SLEEP, drain=DrainSpec(DrainMode.IF_IDLE))
        operation = await rig.do(idle)
        assert (operation.state, operation.code) == (OperationState.REJECTED, RejectCode.NOT_IDLE)
        assert asyncio.get_running_loop().time() - began_s < 1.0
        assert (rig.chat[0].gate.running, rig.chat[0].gate.holder) == (1, None)
        rig.assert_untouched(before)
        rig.chat[0].gate.running = 0
        assert (await rig.do(idle)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_phases_carry_seconds_and_bytes(rig: Rig) -> None:
    """C6."""

    async def story() -> None:
        for rank in rig.chat:
            rank.delay_s = {"stage": 2.0, "commit": 0.5}
        operation = await rig.do(SLEEP)
        phases = {phase.name.value: phase for phase in operation.phases}
        assert list(phases) == ["preflight", "drain", "stage", "commit", "publish"]
        assert round(phases["stage"].seconds, 3) == 2.0 and round(phases["commit"].seconds, 3) == 0.5
        assert phases["stage"].bytes == 3 * WEIGHTS_BYTES
        assert phases["commit"].bytes == 3 * (WEIGHTS_BYTES + KV_BYTES)

    rig.run(story)
