"""Operations come to an end also where those who would have ended them are gone (C6)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from coordinator_memory_journal import JournalStore
from coordinator_rig import PATIENCE_S, SLEEP, MemoryRig, asking

from torpor.actors.coordinator import Fault
from torpor.actors.messages import Kind, ModelState, OperationState, RejectCode

BROKEN = RuntimeError("as scripted")


@pytest.fixture
def rig() -> MemoryRig:
    made = MemoryRig(JournalStore())
    made.with_maker()
    return made


@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.REFUSE])
def test_a_delete_whose_drain_goes_wrong_leaves_the_model_to_serve(rig: MemoryRig, fault: Fault) -> None:
    async def story() -> None:
        rig.chat[0].fault("drain", fault)
        operation = await rig.do(asking(Kind.DELETE))
        assert operation.state is OperationState.REJECTED and operation.reason
        assert rig.gate_open() and rig.coordinator.published_state("chat") is ModelState.AWAKE
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_a_delete_whose_decision_cannot_be_written_leaves_the_model_to_serve(rig: MemoryRig) -> None:
    async def story() -> None:
        rig.store.refusals["_decide"] = 1
        operation = await rig.do(asking(Kind.DELETE))
        assert (operation.state, operation.code) == (OperationState.REJECTED, RejectCode.REFUSED)
        assert "no room" in (operation.reason or "") and rig.gate_open()
        assert (await rig.do(asking(Kind.DELETE))).state is OperationState.SUCCEEDED

    rig.run(story)


def test_a_delete_whose_end_cannot_be_written_can_be_had_again(rig: MemoryRig) -> None:
    async def story() -> None:
        rig.store.refusals["_finish_deletion"] = 1
        operation = await rig.do(asking(Kind.DELETE))
        assert operation.state is OperationState.FAILED and "delete it again" in (operation.reason or "")
        assert (await rig.do(asking(Kind.DELETE))).state is OperationState.SUCCEEDED
        assert not rig.cluster.ranks.get("chat") and [
            model.name for model in await rig.coordinator.models()
        ] == ["solo"]

    rig.run(story)


async def leave_a_sleep_open(rig: MemoryRig) -> str:
    """The coordinator stops in the middle of it; its ranks die before the next one comes."""
    for rank in rig.chat:
        rank.delay_s = {"stage": 30.0}
    sleep = await rig.coordinator.submit(SLEEP)
    await asyncio.sleep(1.0)
    for rank in rig.chat:
        rank.die()
    return sleep.id


async def deleted(rig: MemoryRig) -> None:
    await rig.restart()
    assert (await rig.do(asking(Kind.DELETE))).state is OperationState.SUCCEEDED


async def not_brought_up(rig: MemoryRig) -> None:
    assert rig.maker is not None
    rig.maker.errors["load"] = [BROKEN, BROKEN]  # of both models
    await rig.restart()


@pytest.mark.parametrize("how", [deleted, not_brought_up])
def test_an_operation_left_open_ends_where_its_ranks_are_gone_for_good(
    rig: MemoryRig, how: Callable[[MemoryRig], Awaitable[None]]
) -> None:
    async def story() -> None:
        left_open = await leave_a_sleep_open(rig)
        await how(rig)
        operation = await rig.coordinator.wait(left_open, PATIENCE_S)
        assert (operation.state, operation.code) == (OperationState.FAILED, RejectCode.RANK_FAILED)
        assert "ranks are gone" in (operation.reason or "") and operation.finished_at is not None

    rig.run(story)


def test_a_decided_operation_whose_ranks_were_replaced_is_not_told_to_have_changed_nothing(
    rig: MemoryRig,
) -> None:
    async def story() -> None:
        rig.store.refusals["_finish"] = 1
        rig.chat[1].fault("commit", Fault.REFUSE, 1000)
        assert (await rig.do(SLEEP)).state is OperationState.FAILED
        assert (await rig.do(asking(Kind.RECOVER))).state is OperationState.SUCCEEDED
        await rig.restart()
        (operation,) = [one for one in await rig.coordinator.operations("chat") if one.kind is Kind.SLEEP]
        assert (operation.state, operation.code) == (OperationState.FAILED, RejectCode.RANK_FAILED)
        assert rig.coordinator.published_state("chat") is ModelState.AWAKE and rig.gate_open()

    rig.run(story)


def test_a_sleep_that_a_second_coordinator_ends_is_one_hold(rig: MemoryRig) -> None:
    """G6: the outcome could not be written, and what was published since says that it is held."""

    async def story() -> None:
        rig.store.refusals["_finish"] = 1
        leased = await rig.do(asking(Kind.SLEEP, lease_s=60.0))
        assert leased.state is OperationState.SUCCEEDED
        await rig.journal.publish(rig.coordinator._models["chat"].published)
        await rig.restart()
        assert (await rig.coordinator.operation(leased.id)).state is OperationState.SUCCEEDED
        holds = (await rig.coordinator.model("chat")).holds
        assert [hold.operation for hold in holds] == [leased.id]
        await asyncio.sleep(100.0)
        (kept,) = (await rig.coordinator.model("chat")).holds
        assert kept.lease_s is None

    rig.run(story)
