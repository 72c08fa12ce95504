"""A failed model comes back: all its ranks are replaced, towards the state that was published last (M6)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_rig import CONFIG, KV_BYTES, PATIENCE_S, SLEEP, WAKE, Rig, asking

from torpor.actors.config import RecoverPolicy
from torpor.actors.coordinator import Fault, MemoryMaker
from torpor.actors.coordinator.records import Published
from torpor.actors.messages import (
    GateReason,
    Kind,
    ModelState,
    OnConflict,
    OnDiscard,
    Operation,
    OperationState,
    Origin,
    RejectCode,
    RestoreMode,
)

RECOVER = asking(Kind.RECOVER)
BOTH = {"kv_cache", "weights"}


def making_rig(folder: Path, policy: RecoverPolicy = RecoverPolicy.MANUAL) -> tuple[Rig, MemoryMaker]:
    models = tuple(replace(model, recover=policy) for model in CONFIG.models)
    rig = Rig(folder / "journal.db", replace(CONFIG, models=models))
    return rig, rig.with_maker()


async def lose(rig: Rig, rank: int) -> None:
    """A rank dies, and is missed."""
    rig.chat[rank].die()
    await asyncio.sleep(3.0)
    assert rig.coordinator.published_state("chat") is ModelState.FAILED


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_model_that_lost_a_rank_is_awake_and_serves_again_with_new_ranks_only(
    tmp_path: Path, rank: int
) -> None:
    rig, _ = making_rig(tmp_path)

    async def story() -> None:
        free, old = rig.free_bytes(), {each.incarnation for each in rig.chat}
        await lose(rig, rank)
        operation = await rig.do(RECOVER)
        assert operation.state is OperationState.SUCCEEDED, operation.reason
        assert [phase.name for phase in operation.phases] == ["end", "load"]
        assert [record.rank for record in operation.ranks] == [0, 1, 2]
        assert not old & {each.incarnation for each in rig.chat}, "all of them are replaced"
        assert rig.free_bytes() == free and rig.gate_open()
        assert (await rig.coordinator.model("chat")).state is ModelState.AWAKE
        for request in (SLEEP, WAKE):
            assert (await rig.do(request)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_a_sleeping_model_recovers_asleep_under_its_hold_and_says_what_was_lost(tmp_path: Path) -> None:
    """G6: nobody was let in meanwhile, and the memory stays with whoever asked for it."""
    rig, _ = making_rig(tmp_path)

    async def story() -> None:
        keep_all = {"kv_cache": RestoreMode.PINNED, "weights": RestoreMode.CPU}
        await rig.do(asking(Kind.SLEEP, restore=keep_all))
        free = rig.free_bytes()
        await lose(rig, 1)
        let_in: list[float] = []
        operation = await rig.coordinator.submit(RECOVER)
        while (operation := await rig.coordinator.operation(operation.id)).state is OperationState.RUNNING:
            await asyncio.sleep(0)
            let_in += [rig.loop_time()] if "chat" in rig.cluster.ranks and rig.gate_open() else []
        assert operation.state is OperationState.SUCCEEDED and not let_in
        assert operation.lost_bytes == {"kv_cache": 3 * KV_BYTES}, "the weights are not"
        view = await rig.coordinator.model("chat")
        assert (view.state, view.hold) == (ModelState.ASLEEP, True)
        assert rig.parked() == [BOTH] * 3 and rig.free_bytes() == free
        assert {rank.ledger.parked["weights"] for rank in rig.chat} == {RestoreMode.CPU}
        assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED
        assert rig.gate_open() and not (await rig.coordinator.model("chat")).hold

    rig.run(story)


def test_what_one_wants_awake_or_asleep_it_becomes(tmp_path: Path) -> None:
    rig, _ = making_rig(tmp_path)

    async def story() -> None:
        await lose(rig, 0)
        asleep = await rig.do(asking(Kind.RECOVER, to=ModelState.ASLEEP))
        assert asleep.state is OperationState.SUCCEEDED and rig.parked() == [BOTH] * 3
        await lose(rig, 0)
        awake = await rig.do(asking(Kind.RECOVER, to=ModelState.AWAKE))
        assert awake.state is OperationState.SUCCEEDED and rig.parked() == [set()] * 3
        assert rig.gate_open()

    rig.run(story)


def test_a_healthy_model_is_left_as_it_is(tmp_path: Path) -> None:
    """C1: repeating any request in any state never harms."""
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        ranks = list(rig.chat)
        for request in (RECOVER, asking(Kind.RECOVER, to=ModelState.AWAKE)):
            assert (await rig.do(request)).state is OperationState.SUCCEEDED
        refused = await rig.do(asking(Kind.RECOVER, to=ModelState.ASLEEP))
        assert (refused.code, "sleep it instead" in (refused.reason or "")) == (RejectCode.WRONG_STATE, True)
        assert rig.chat == ranks and "end" not in maker.calls

    rig.run(story)


def test_a_model_that_woke_without_its_weights_gets_them_from_their_source(tmp_path: Path) -> None:
    """C9."""
    rig, _ = making_rig(tmp_path)

    async def story() -> None:
        await rig.do(asking(Kind.SLEEP, restore={"weights": RestoreMode.NONE}))
        await rig.do(asking(Kind.WAKE, on_discard=OnDiscard.WAIT))
        assert (await rig.coordinator.model("chat")).gate_reason is GateReason.CONTENTS_UNDEFINED
        assert not rig.gate_open()
        assert (await rig.do(RECOVER)).state is OperationState.SUCCEEDED
        assert rig.gate_open() and (await rig.coordinator.model("chat")).gate_open

    rig.run(story)


def test_sleep_and_wake_are_refused_meanwhile_or_wait_it_out_and_an_equal_recover_joins(
    tmp_path: Path,
) -> None:
    """C1, C4."""
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        await lose(rig, 2)
        maker.delay_s["load"] = 20.0
        operation = await rig.coordinator.submit(RECOVER)
        await asyncio.sleep(1.0)
        (view, *_) = await rig.coordinator.models()
        assert (view.state, view.gate_reason) == (ModelState.RECOVERING, GateReason.RECOVERING)
        for request in (SLEEP, WAKE):
            refused = await rig.do(request)
            assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.WRONG_STATE)
        assert (await rig.coordinator.submit(RECOVER)).id == operation.id
        waiting = await rig.coordinator.submit(asking(Kind.SLEEP, on_conflict=OnConflict.WAIT))
        assert (await rig.coordinator.wait(waiting.id, PATIENCE_S)).state is OperationState.SUCCEEDED
        assert (await rig.coordinator.operation(operation.id)).state is OperationState.SUCCEEDED
        assert (await rig.do(asking(Kind.SLEEP, "solo"))).state is OperationState.SUCCEEDED

    rig.run(story)


@pytest.mark.parametrize("method", ["end", "make", "load"])
def test_a_recovery_that_goes_wrong_fails_with_its_reason_and_the_next_one_succeeds(
    tmp_path: Path, method: str
) -> None:
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        free = rig.free_bytes()
        await lose(rig, 1)
        maker.errors[method].append(RuntimeError("no room in here"))
        operation = await rig.do(RECOVER)
        assert operation.state is OperationState.FAILED and "no room in here" in (operation.reason or "")
        view = (await rig.coordinator.models())[0]
        assert view.state is ModelState.FAILED and "no room in here" in view.error
        assert rig.free_bytes()[1] > free[1], "what was loaded in vain is free again"
        assert (await rig.do(RECOVER)).state is OperationState.SUCCEEDED
        assert rig.free_bytes() == free and rig.gate_open()

    rig.run(story)


def test_updated_weights_are_not_replaced_by_older_ones_unless_that_is_wanted(tmp_path: Path) -> None:
    """C9: no version is reported whose bytes are not there."""
    rig, _ = making_rig(tmp_path, RecoverPolicy.AUTO)

    async def story() -> None:
        runtime = rig.coordinator._models["chat"]
        runtime.published = runtime.published.changed(weights_version=3)
        await rig.journal.publish(runtime.published)
        await lose(rig, 1)
        await asyncio.sleep(60.0)
        view = await rig.coordinator.model("chat")
        assert view.state is ModelState.FAILED, "nor by itself"
        assert "recover with accept_stale_weights" in view.error, "who looks is told why, and what to do"
        refused = await rig.do(RECOVER)
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.STALE_WEIGHTS)
        assert "version 3" in (refused.reason or "")
        done = await rig.do(asking(Kind.RECOVER, accept_stale_weights=True))
        assert done.state is OperationState.SUCCEEDED
        assert (await rig.coordinator.model("chat")).weights_version == 0

    rig.run(story)


def test_a_recovery_that_was_accepted_and_not_begun_and_is_refused_leaves_the_model_as_it_is(
    tmp_path: Path,
) -> None:
    """M6, C6: the next coordinator finds it open, and may not bring older weights; nothing is to be done."""
    rig, _ = making_rig(tmp_path)

    async def story() -> None:
        await rig.journal.publish(rig.coordinator._models["chat"].published.changed(weights_version=2))
        operation = Operation("left", Kind.RECOVER, "chat", OperationState.RUNNING, [], {}, created_at=0.0)
        await rig.journal.begin(operation, RECOVER, 0.0)
        await rig.restart()
        done = await rig.coordinator.wait("left", PATIENCE_S)
        assert (done.state, done.code) == (OperationState.REJECTED, RejectCode.STALE_WEIGHTS)
        view = await rig.coordinator.model("chat")
        assert view.state is ModelState.AWAKE, view
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED

    rig.run(story)


@pytest.mark.parametrize("at_s", [0.5, 1.5, 2.5])
def test_a_coordinator_that_dies_in_a_recovery_is_followed_by_one_that_recovers(
    tmp_path: Path, at_s: float
) -> None:
    """M6: in each of its parts, which take a second here."""
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        free = rig.free_bytes()
        await rig.do(SLEEP)
        asleep = rig.free_bytes()
        await lose(rig, 1)
        maker.delay_s = dict.fromkeys(("end", "make", "load"), 1.0)
        operation = await rig.coordinator.submit(RECOVER)
        await asyncio.sleep(at_s)
        await rig.restart()
        done = await rig.coordinator.wait(operation.id, PATIENCE_S)
        assert done.state is OperationState.SUCCEEDED, done.reason
        assert (await rig.coordinator.model("chat")).state is ModelState.ASLEEP
        assert rig.free_bytes() == asleep
        assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED and rig.free_bytes() == free

    rig.run(story)


def test_a_lost_rank_is_replaced_without_a_person(tmp_path: Path) -> None:
    """M6."""
    rig, _ = making_rig(tmp_path, RecoverPolicy.AUTO)

    async def story() -> None:
        rig.chat[1].fault("commit", Fault.DIE)
        assert (await rig.do(SLEEP)).state is OperationState.FAILED
        await asyncio.sleep(5.0)
        assert (await rig.coordinator.model("chat")).state is ModelState.AWAKE, "published last"
        (operation, *_) = await rig.coordinator.operations("chat")
        assert (operation.kind, operation.origin) == (Kind.RECOVER, Origin.FAILURE)
        assert rig.gate_open()

    rig.run(story)


def test_a_model_that_fails_again_and_again_is_left_to_a_person_in_the_end(tmp_path: Path) -> None:
    rig, maker = making_rig(tmp_path, RecoverPolicy.AUTO)

    async def story() -> None:
        maker.errors["load"] = [RuntimeError("no room in here")] * 100
        rig.chat[1].die()
        await asyncio.sleep(300.0)
        tries = [op for op in await rig.coordinator.operations("chat") if op.kind is Kind.RECOVER]
        assert len(tries) == 3
        assert rig.coordinator.published_state("chat") is ModelState.FAILED
        maker.errors["load"] = []
        assert (await rig.do(RECOVER)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_when_all_ranks_ended_with_ray_s_head_models_come_back_as_they_were(tmp_path: Path) -> None:
    """In doubt: the last row but one. A service that was ended in order begins as it is configured."""
    rig, _ = making_rig(tmp_path)

    async def story() -> None:
        await rig.do(SLEEP)
        asleep = rig.free_bytes()
        for rank in (*rig.chat, rig.solo):
            rank.die()
        await rig.restart()
        await asyncio.sleep(1.0)
        view = await rig.coordinator.model("chat")
        assert (view.state, view.hold) == (ModelState.ASLEEP, True) and not rig.gate_open()
        assert rig.free_bytes() == asleep and rig.gate_open("solo")
        await rig.coordinator.end_service()
        assert all(device.free_bytes == device.capacity_bytes for device in rig.cluster.devices)
        await rig.restart()
        await asyncio.sleep(1.0)
        view = await rig.coordinator.model("chat")
        assert (view.state, view.hold) == (ModelState.AWAKE, False) and rig.gate_open()

    rig.run(story)


def test_published_modes_outlive_the_coordinator() -> None:
    from torpor.actors.coordinator.records import published_from_json, published_to_json

    published = Published("chat", ("weights",), ("weights",), modes={"weights": "cpu"})
    assert published_from_json(published_to_json(published)) == published


def test_ranks_of_a_recovery_that_failed_let_nobody_in_either(tmp_path: Path) -> None:
    """M6: the leader that a recovery made must not serve on when another of its ranks is lost in loading."""
    rig, maker = making_rig(tmp_path)

    async def story() -> None:
        await lose(rig, 2)
        maker.delay_s["load"] = 2.0
        recovery = await rig.coordinator.submit(RECOVER)
        await asyncio.sleep(1.0)
        rig.chat[1].die()
        outcome = await rig.coordinator.wait(recovery.id, PATIENCE_S)
        assert outcome.state is OperationState.FAILED and not rig.chat[0].dead
        await asyncio.sleep(3.0)
        assert rig.coordinator.published_state("chat") is ModelState.FAILED and not rig.gate_open()

    rig.run(story)


def test_an_operation_that_ends_well_does_not_take_back_that_its_model_failed_meanwhile(
    tmp_path: Path,
) -> None:
    """M6: whose leader was told to let nobody in any more is not called awake."""
    rig, _ = making_rig(tmp_path)

    async def story() -> None:
        rig.chat[1].delay_s["commit"] = 1.0
        update = await rig.coordinator.submit(asking(Kind.UPDATE, weights_path="/weights/1"))
        await asyncio.sleep(0.3)
        await rig.coordinator.fail("chat", "its load has failed")
        outcome = await rig.coordinator.wait(update.id, PATIENCE_S)
        assert outcome.state is OperationState.SUCCEEDED, outcome.reason
        await asyncio.sleep(3.0)
        assert rig.coordinator.published_state("chat") is ModelState.FAILED and not rig.gate_open()

    rig.run(story)
