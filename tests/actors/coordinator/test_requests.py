"""What becomes of requests: joined, refused, queued, cancelled, repeated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from coordinator_rig import PATIENCE_S, SLEEP, WAKE, Rig, asking

from torpor.actors.coordinator import Fault
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    GateReason,
    Kind,
    ModelState,
    OnConflict,
    OperationState,
    RejectCode,
    RestoreMode,
)
from torpor.actors.ports import KeyReused


def slow(rig: Rig, **delays_s: float) -> None:
    for rank in rig.chat:
        rank.delay_s = dict(delays_s)


def test_equal_requests_share_one_operation(rig: Rig) -> None:
    """C4, F10, F20."""

    async def story() -> None:
        slow(rig, stage=1.0)
        first = await rig.coordinator.submit(SLEEP)
        same = asking(Kind.SLEEP, tags=("weights", "kv_cache"), restore={"weights": RestoreMode.PINNED})
        assert (await rig.coordinator.submit(same)).id == first.id, "defaults filled in, it is the same"
        for other in (
            asking(Kind.SLEEP, tags=("weights",)),
            asking(Kind.SLEEP, restore={"weights": RestoreMode.CPU}),
            asking(Kind.SLEEP, dry_run=True),
            WAKE,
        ):
            refused = await rig.coordinator.submit(other)
            assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.CONFLICT)
            assert first.id in (refused.reason or "")
        assert (await rig.coordinator.wait(first.id)).state is OperationState.SUCCEEDED
        assert rig.chat[0].calls.count("stage") == 1

    rig.run(story)


def test_requests_that_wait_take_their_turns_in_order(rig: Rig) -> None:
    async def story() -> None:
        slow(rig, stage=1.0)
        ids = [(await rig.coordinator.submit(SLEEP)).id]
        for kind in (Kind.WAKE, Kind.SLEEP, Kind.WAKE):
            ids.append((await rig.coordinator.submit(asking(kind, on_conflict=OnConflict.WAIT))).id)
        assert len(set(ids)) == 4
        outcomes = [await rig.coordinator.wait(name) for name in ids]
        assert [o.state for o in outcomes] == [OperationState.SUCCEEDED] * 4
        assert sorted(outcomes, key=lambda o: o.phases[-1].started_at) == outcomes
        assert (await rig.coordinator.model("chat")).state is ModelState.AWAKE

    rig.run(story)


def test_a_request_that_waits_can_be_cancelled_and_runs_out_of_time(rig: Rig) -> None:
    async def story() -> None:
        slow(rig, stage=30.0)
        running = await rig.coordinator.submit(SLEEP)
        waiting = await rig.coordinator.submit(asking(Kind.WAKE, on_conflict=OnConflict.WAIT))
        assert await rig.coordinator.cancel(waiting.id)
        assert (await rig.coordinator.wait(waiting.id)).code is RejectCode.CANCELLED
        hasty = await rig.do(asking(Kind.WAKE, on_conflict=OnConflict.WAIT, timeout_s=2.0))
        assert (hasty.state, hasty.code) == (OperationState.REJECTED, RejectCode.CONFLICT)
        assert (await rig.coordinator.wait(running.id)).state is OperationState.SUCCEEDED

    rig.run(story)


@pytest.mark.parametrize("method", ["preflight", "drain", "stage"])
def test_cancel_works_until_the_decision(rig: Rig, method: str) -> None:
    async def story() -> None:
        before = rig.free_bytes()
        slow(rig, **{method: 1.0})
        operation = await rig.coordinator.submit(SLEEP)
        await asyncio.sleep(0.5)
        assert await rig.coordinator.cancel(operation.id)
        slow(rig)
        outcome = await rig.coordinator.wait(operation.id, PATIENCE_S)
        assert (outcome.state, outcome.code) == (OperationState.REJECTED, RejectCode.CANCELLED)
        await asyncio.sleep(2.0)  # what was under way on the ranks ends, and changes nothing
        rig.assert_untouched(before)
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_cancel_comes_too_late_after_the_decision(rig: Rig) -> None:
    async def story() -> None:
        slow(rig, commit=1.0)
        operation = await rig.coordinator.submit(SLEEP)
        await asyncio.sleep(0.5)
        assert not await rig.coordinator.cancel(operation.id)
        assert (await rig.coordinator.wait(operation.id)).state is OperationState.SUCCEEDED
        assert not await rig.coordinator.cancel(operation.id)
        with pytest.raises(KeyError):
            await rig.coordinator.cancel("op-none")

    rig.run(story)


def test_a_caller_that_goes_away_changes_nothing(rig: Rig) -> None:
    """C7."""

    async def story() -> None:
        slow(rig, stage=5.0)
        caller = asyncio.create_task(rig.do(SLEEP))
        await asyncio.sleep(1.0)
        caller.cancel()
        (operation,) = await rig.coordinator.operations("chat")
        assert operation.state is OperationState.RUNNING
        assert (await rig.coordinator.wait(operation.id, 1.0)).state is OperationState.RUNNING
        assert (await rig.coordinator.wait(operation.id)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_a_key_gives_one_operation_while_it_runs_and_after_and_over_a_restart(rig: Rig) -> None:
    """C5."""

    async def story() -> None:
        slow(rig, stage=1.0)
        keyed = asking(Kind.SLEEP, idempotency_key="me:1")
        first = await rig.coordinator.submit(keyed)
        assert (await rig.coordinator.submit(keyed)).id == first.id
        await rig.coordinator.wait(first.id)
        await rig.do(WAKE)
        again = await rig.coordinator.submit(keyed)
        assert (again.id, again.state) == (first.id, OperationState.SUCCEEDED)
        with pytest.raises(KeyReused):
            await rig.coordinator.submit(asking(Kind.SLEEP, idempotency_key="me:1", verify=True))
        await rig.restart()
        assert (await rig.coordinator.submit(keyed)).id == first.id
        assert (await rig.coordinator.model("chat")).state is ModelState.AWAKE
        rig.now_s += 24 * 3600
        assert (await rig.coordinator.submit(keyed)).id != first.id

    rig.run(story)


def test_a_key_starts_anew_after_a_rejection(rig: Rig) -> None:
    """C5."""

    async def story() -> None:
        keyed = asking(Kind.SLEEP, idempotency_key="me:1")
        rig.chat[1].fault("stage", Fault.RAISE)
        first = await rig.do(keyed)
        assert first.state is OperationState.REJECTED
        second = await rig.do(keyed)
        assert (second.state, second.id != first.id) == (OperationState.SUCCEEDED, True)

    rig.run(story)


def test_who_would_wait_for_requests_does_not_join_who_wants_an_idle_model(rig: Rig) -> None:
    """C4, G2: the second would be refused with the first."""

    async def story() -> None:
        slow(rig, preflight=1.0)
        rig.chat[0].gate.running = 1
        idle = await rig.coordinator.submit(asking(Kind.SLEEP, drain=DrainSpec(DrainMode.IF_IDLE)))
        patient = await rig.coordinator.submit(
            asking(Kind.SLEEP, drain=DrainSpec(DrainMode.ABORT), on_conflict=OnConflict.WAIT)
        )
        assert patient.id != idle.id
        assert (await rig.coordinator.wait(idle.id)).code is RejectCode.NOT_IDLE
        assert (await rig.coordinator.wait(patient.id)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_a_key_that_joined_an_operation_keeps_to_it(rig: Rig) -> None:
    async def story() -> None:
        slow(rig, stage=1.0)
        first = await rig.coordinator.submit(SLEEP)
        keyed = asking(Kind.SLEEP, idempotency_key="me:2")
        assert (await rig.coordinator.submit(keyed)).id == first.id
        await rig.coordinator.wait(first.id)
        await rig.do(WAKE)
        assert (await rig.coordinator.submit(keyed)).id == first.id

    rig.run(story)


def test_unknown_models_and_tags_are_refused_by_name(rig: Rig) -> None:
    async def story() -> None:
        refused = await rig.do(asking(Kind.SLEEP, "chatt"))
        assert refused.code is RejectCode.UNKNOWN_MODEL and "chat, solo" in (refused.reason or "")
        for request in (
            asking(Kind.SLEEP, tags=("wights",)),
            asking(Kind.SLEEP, restore={"wights": RestoreMode.CPU}),
        ):
            refused = await rig.do(request)
            assert refused.code is RejectCode.UNKNOWN_TAG and "kv_cache, weights" in (refused.reason or "")
        assert (await rig.coordinator.operation(refused.id)) == refused, "refusals can be read afterwards"
        assert rig.chat[0].calls.count("preflight") == 0

    rig.run(story)


def test_a_loading_model_is_refused_and_one_that_waits_gets_its_turn_when_it_has_loaded(rig: Rig) -> None:
    """C1."""

    async def story() -> None:
        rig.chat[1].loaded = False
        await rig.restart()
        refused = await rig.do(SLEEP)
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.WRONG_STATE)
        view = await rig.coordinator.model("chat")
        assert view.state is ModelState.RECOVERING and "rank 1 is not loaded" in view.error
        waiting = await rig.coordinator.submit(asking(Kind.SLEEP, on_conflict=OnConflict.WAIT))
        await asyncio.sleep(5.0)
        rig.chat[1].loaded = True
        assert (await rig.coordinator.wait(waiting.id, PATIENCE_S)).state is OperationState.SUCCEEDED
        assert "abort" not in rig.chat[0].calls, "it was taken for one that a coordinator before has left"

    rig.run(story)


def test_the_state_on_the_way_is_told_without_asking_any_rank(rig: Rig) -> None:
    async def story() -> None:
        slow(rig, drain=1.0, stage=1.0)
        operation = await rig.coordinator.submit(SLEEP)
        seen = []
        for _ in range(5):
            await asyncio.sleep(0.5)
            calls = list(rig.chat[0].calls)
            view = (await rig.coordinator.models())[0]
            assert rig.chat[0].calls == calls
            seen.append((view.state, view.gate_reason, view.operation))
        running = operation.id
        assert seen[0] == (ModelState.SLEEPING, GateReason.DRAINING, running)
        assert (ModelState.SLEEPING, GateReason.SLEEPING, running) in seen
        assert seen[-1] == (ModelState.ASLEEP, GateReason.ASLEEP, None)

    rig.run(story)


def test_a_rank_that_does_not_answer_is_shown_as_unknown(rig: Rig) -> None:
    async def story() -> None:
        rig.chat[1].fault("status", Fault.HANG)
        rig.chat[2].die()
        view = await rig.coordinator.model("chat")
        assert [bool(rank.error) for rank in view.ranks] == [False, True, True]
        assert "unknown" in view.ranks[1].error and view.ranks[1].device_id == "memory:1"
        assert "gone" in view.ranks[2].error and not view.ranks[2].loaded
        with pytest.raises(KeyError):
            await rig.coordinator.model("none")

    rig.run(story)


def test_a_sleep_that_may_wake_on_request_is_no_hold_and_an_explicit_one_makes_it_one(rig: Rig) -> None:
    """G6."""

    async def story() -> None:
        await rig.do(asking(Kind.SLEEP, wake_on_request=True))
        assert not (await rig.coordinator.model("chat")).hold
        await rig.do(SLEEP)
        assert (await rig.coordinator.model("chat")).hold
        await rig.restart()
        assert (await rig.coordinator.model("chat")).hold
        await rig.do(asking(Kind.SLEEP, wake_on_request=True))
        assert (await rig.coordinator.model("chat")).hold, "only a wake ends a hold"

    rig.run(story)


def test_the_time_limit_of_a_request_bounds_preflight_to_stage(rig: Rig) -> None:
    """C6."""

    async def story() -> None:
        before = rig.free_bytes()
        slow(rig, preflight=1.0, stage=30.0)
        began_s = rig.loop_time()
        operation = await rig.do(asking(Kind.SLEEP, timeout_s=5.0))
        assert (operation.state, operation.code) == (OperationState.REJECTED, RejectCode.STAGE_TIMEOUT)
        assert rig.loop_time() - began_s < 10.0
        await asyncio.sleep(60.0)
        rig.assert_untouched(before)

    rig.run(story)


def test_who_hears_of_an_operation_s_end_can_begin_the_next_one_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: its end is told when it is written, and nothing of it is in the way any more."""

    async def story() -> None:
        finish = rig.journal.finish

        async def slowly(*arguments: Any) -> None:
            await asyncio.sleep(3.0)
            await finish(*arguments)

        monkeypatch.setattr(rig.journal, "finish", slowly)
        submitted = await rig.coordinator.submit(SLEEP)
        for _ in range(100):
            if (await rig.coordinator.operation(submitted.id)).state is not OperationState.RUNNING:
                break
            await asyncio.sleep(0.1)
        assert rig.loop_time() >= 3.0
        assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED

    rig.run(story)
