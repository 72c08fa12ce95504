"""Models are made and deleted while the service runs; what is left of a deleted one is its operations."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from coordinator_rig import PATIENCE_S, SLEEP, Rig, asking

from torpor.actors.config import ModelConfig
from torpor.actors.coordinator import MemoryMaker
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    GateReason,
    Kind,
    ModelState,
    OnConflict,
    OperationState,
    RejectCode,
)
from torpor.actors.ports import ModelExists

DELETE = asking(Kind.DELETE)


def making_rig(folder: Path) -> tuple[Rig, MemoryMaker]:
    rig = Rig(folder / "journal.db")
    return rig, rig.with_maker()


def names(rig: Rig) -> list[str]:
    return sorted(rig.coordinator._models)


@pytest.mark.parametrize("state", [ModelState.AWAKE, ModelState.ASLEEP, ModelState.FAILED])
def test_a_deleted_model_has_no_rank_no_memory_and_no_records(tmp_path: Path, state: ModelState) -> None:
    rig, _ = making_rig(tmp_path)

    async def story() -> None:
        ranks = rig.chat
        if state is ModelState.ASLEEP:
            await rig.do(SLEEP)
        elif state is ModelState.FAILED:
            await rig.coordinator.fail("chat", "the test says so")
        operation = await rig.do(DELETE)
        assert operation.state is OperationState.SUCCEEDED, operation.reason
        assert operation.finished_at is not None
        assert all(rank.dead for rank in ranks) and "chat" not in rig.cluster.ranks
        assert {device.used.get(f"chat/{i}", 0) for i, device in enumerate(rig.cluster.devices)} == {0}
        assert sum(record.freed_bytes for record in operation.ranks) == (
            0 if state is ModelState.ASLEEP else 3 * (150 << 20)
        )
        assert names(rig) == ["solo"] and "chat" not in await rig.journal.published()
        assert rig.coordinator.reserved_bytes() == 0
        refused = await rig.do(SLEEP)
        assert refused.code is RejectCode.UNKNOWN_MODEL
        await rig.restart()
        assert names(rig) == ["solo"], "nor does it come back with the next coordinator"
        assert (await rig.coordinator.operation(operation.id)).state is OperationState.SUCCEEDED
        assert (await rig.do(asking(Kind.SLEEP, "solo"))).state is OperationState.SUCCEEDED

    rig.run(story)


def test_a_delete_drains_first_and_is_rejected_when_requests_do_not_end_in_time(tmp_path: Path) -> None:
    """G2: and with mode abort it ends them."""
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        free = rig.free_bytes()
        rig.chat[0].gate.running = 2
        begun = await rig.coordinator.submit(asking(Kind.DELETE, drain=DrainSpec(timeout_s=3.0)))
        await asyncio.sleep(1.0)
        (view, *_) = await rig.coordinator.models()
        assert view.gate_reason is GateReason.DRAINING and not rig.gate_open()
        refused = await rig.coordinator.wait(begun.id, PATIENCE_S)
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.DRAIN_TIMEOUT)
        assert rig.gate_open() and rig.free_bytes() == free and "end" not in maker.calls
        rig.chat[0].gate.running = 2
        done = await rig.do(asking(Kind.DELETE, drain=DrainSpec(DrainMode.ABORT)))
        assert (done.state, done.aborted_requests) == (OperationState.SUCCEEDED, 2)

    rig.run(story)


def test_a_delete_can_be_cancelled_until_its_decision(tmp_path: Path) -> None:
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        rig.chat[0].gate.running = 1
        begun = await rig.coordinator.submit(DELETE)
        await asyncio.sleep(1.0)
        assert await rig.coordinator.cancel(begun.id)
        rig.chat[0].gate.running = 0
        ended = await rig.coordinator.wait(begun.id, PATIENCE_S)
        assert (ended.state, ended.code) == (OperationState.REJECTED, RejectCode.CANCELLED)
        assert rig.gate_open() and "end" not in maker.calls
        maker.delay_s["end"] = 5.0
        again = await rig.coordinator.submit(DELETE)
        await asyncio.sleep(1.0)
        assert not await rig.coordinator.cancel(again.id), "its ranks are ending already"
        assert (await rig.coordinator.wait(again.id, PATIENCE_S)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_who_waits_for_a_model_that_is_deleted_is_told_so(tmp_path: Path) -> None:
    """C4, C6."""
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        for rank in rig.chat:
            rank.delay_s = {"stage": 2.0}
        first = await rig.coordinator.submit(SLEEP)
        maker.delay_s["end"] = 5.0
        deletion = await rig.coordinator.submit(asking(Kind.DELETE, on_conflict=OnConflict.WAIT))
        waiting = await rig.coordinator.submit(asking(Kind.WAKE, on_conflict=OnConflict.WAIT))
        assert (await rig.coordinator.wait(first.id, PATIENCE_S)).state is OperationState.SUCCEEDED
        await asyncio.sleep(1.0)
        assert (await rig.coordinator.submit(DELETE)).id == deletion.id, "an equal one joins"
        assert (await rig.do(asking(Kind.WAKE))).code is RejectCode.UNKNOWN_MODEL
        with pytest.raises(ModelExists, match="is being deleted"):
            await rig.coordinator.create(rig.config.models[0])
        assert (await rig.coordinator.wait(deletion.id, PATIENCE_S)).state is OperationState.SUCCEEDED
        ended = await rig.coordinator.wait(waiting.id, PATIENCE_S)
        assert (ended.state, ended.code) == (OperationState.REJECTED, RejectCode.UNKNOWN_MODEL)

    rig.run(story)


def test_a_delete_whose_ranks_do_not_end_fails_and_can_be_repeated(tmp_path: Path) -> None:
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        maker.errors["end"].append(TimeoutError("process 77 is still there"))
        failed = await rig.do(DELETE)
        assert failed.state is OperationState.FAILED and "process 77 is still there" in (failed.reason or "")
        assert (await rig.coordinator.models())[0].state is ModelState.FAILED
        assert (await rig.do(DELETE)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_a_model_whose_delete_went_wrong_after_a_restart_can_be_recovered_or_deleted_again(
    tmp_path: Path,
) -> None:
    """C6, M6: it is failed, and known to be, though the coordinator that found it has asked none of its ranks."""
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        maker.delay_s["end"] = 1.0
        begun = await rig.coordinator.submit(DELETE)
        await asyncio.sleep(0.5)
        maker.errors["end"].append(TimeoutError("process 77 is still there"))
        await rig.restart()
        assert (await rig.coordinator.wait(begun.id, PATIENCE_S)).state is OperationState.FAILED
        assert (await rig.do(asking(Kind.RECOVER))).state is OperationState.SUCCEEDED
        assert (await rig.do(DELETE)).state is OperationState.SUCCEEDED

    rig.run(story)


@pytest.mark.parametrize(("at_s", "decided"), [(0.5, False), (1.5, True)])
def test_a_coordinator_that_dies_in_a_delete_is_followed_by_one_that_knows_whether_it_was_decided(
    tmp_path: Path, at_s: float, decided: bool
) -> None:
    """M6: before the decision nothing has happened, after it the model goes."""
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        free = rig.free_bytes()
        rig.chat[0].delay_s["drain"] = 1.0
        maker.delay_s["end"] = 1.0
        begun = await rig.coordinator.submit(DELETE)
        waiting = await rig.coordinator.submit(asking(Kind.WAKE, on_conflict=OnConflict.WAIT))
        await asyncio.sleep(at_s)
        await rig.restart()
        ended = await rig.coordinator.wait(begun.id, PATIENCE_S)
        assert (await rig.coordinator.wait(waiting.id, PATIENCE_S)).state is OperationState.REJECTED
        if decided:
            assert ended.state is OperationState.SUCCEEDED and names(rig) == ["solo"]
        else:
            await asyncio.sleep(PATIENCE_S)
            assert ended.state is OperationState.REJECTED
            assert rig.gate_open() and rig.free_bytes() == free
            assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_a_model_made_while_the_service_runs_is_one_like_all_others_also_after_a_restart(
    tmp_path: Path,
) -> None:
    rig, _ = making_rig(tmp_path)

    async def story() -> None:
        await rig.do(DELETE)
        draft = ModelConfig("draft", tensor_parallel=2)
        view = await rig.coordinator.create(draft)
        assert (view.state, view.gate_reason) == (ModelState.LOADING, GateReason.LOADING)
        await asyncio.sleep(1.0)
        assert (await rig.coordinator.model("draft")).state is ModelState.AWAKE
        assert (await rig.coordinator.create(draft)).state is ModelState.AWAKE, "asked for alike, it stays"
        with pytest.raises(ModelExists, match="with another configuration"):
            await rig.coordinator.create(ModelConfig("draft", tensor_parallel=1))
        assert (await rig.do(asking(Kind.SLEEP, "draft"))).state is OperationState.SUCCEEDED
        await rig.restart()
        assert names(rig) == ["draft", "solo"]
        assert rig.coordinator._models["draft"].config == draft
        assert (await rig.coordinator.model("draft")).state is ModelState.ASLEEP

    rig.run(story)


def test_a_model_that_does_not_load_is_failed_with_its_reason_and_can_be_deleted_and_made_again(
    tmp_path: Path,
) -> None:
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        await rig.do(DELETE)
        free = rig.free_bytes()
        maker.errors["load"].append(RuntimeError("no such file"))
        await rig.coordinator.create(ModelConfig("draft"))
        await asyncio.sleep(1.0)
        (_, view) = await rig.coordinator.models()
        assert view.state is ModelState.FAILED and "no such file" in view.error
        assert rig.free_bytes() == free
        assert (await rig.do(asking(Kind.DELETE, "draft"))).state is OperationState.SUCCEEDED
        await rig.coordinator.create(ModelConfig("draft"))
        await asyncio.sleep(1.0)
        assert (await rig.coordinator.model("draft")).state is ModelState.AWAKE

    rig.run(story)


def test_a_model_that_loads_for_long_can_be_deleted_at_once(tmp_path: Path) -> None:
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        await rig.do(DELETE)
        free = rig.free_bytes()
        maker.delay_s["load"] = 500.0
        await rig.coordinator.create(ModelConfig("draft"))
        await asyncio.sleep(5.0)
        began_s = rig.loop_time()
        assert (await rig.do(asking(Kind.DELETE, "draft"))).state is OperationState.SUCCEEDED
        assert rig.loop_time() - began_s < 10.0
        await asyncio.sleep(600.0)
        assert names(rig) == ["solo"] and rig.free_bytes() == free

    rig.run(story)
