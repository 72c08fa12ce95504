"""A restart without the journal, and the epochs that keep an old coordinator out (M6)."""

from __future__ import annotations

import asyncio

from coordinator_rig import SLEEP, WAKE, Rig

from torpor.actors.coordinator import Fault
from torpor.actors.messages import (
    DrainSpec,
    LedgerPhase,
    ModelState,
    OperationState,
    Phase,
    PhaseCall,
)


def test_a_rank_that_committed_proves_the_decision_when_the_journal_is_lost(rig: Rig) -> None:
    async def story() -> None:
        rig.chat[0].fault("publish", Fault.HANG, 1000)
        rig.chat[1].fault("commit", Fault.HANG, 1000)
        await rig.coordinator.submit(SLEEP)
        await asyncio.sleep(1.0)
        assert [rank.ledger.phase for rank in rig.chat].count(LedgerPhase.COMMITTED) == 2
        await lose_journal(rig)
        assert rig.parked() == [{"kv_cache", "weights"}] * 3 and all(
            rank.ledger.phase is LedgerPhase.IDLE for rank in rig.chat
        )
        view = await rig.coordinator.model("chat")
        assert (view.state, view.gate_open) == (ModelState.ASLEEP, False)
        assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_without_a_journal_what_is_staged_is_aborted(rig: Rig) -> None:
    async def story() -> None:
        before = rig.free_bytes()
        rig.chat[1].fault("stage", Fault.HANG)
        await rig.coordinator.submit(SLEEP)
        await asyncio.sleep(1.0)
        assert [rank.ledger.phase for rank in rig.chat].count(LedgerPhase.STAGED) == 2
        await lose_journal(rig)
        rig.assert_untouched(before)
        assert (await rig.coordinator.model("chat")).state is ModelState.AWAKE

    rig.run(story)


def test_without_a_journal_a_stage_that_still_runs_is_aborted(rig: Rig) -> None:
    """M6: nobody else would ever take back what it stages."""

    async def story() -> None:
        before = rig.free_bytes()
        for rank in rig.chat:
            rank.delay_s = {"stage": 30.0}
        await rig.coordinator.submit(SLEEP)
        await asyncio.sleep(1.0)
        assert [rank.staging for rank in rig.chat] == ["op-1"] * 3
        await lose_journal(rig)
        await asyncio.sleep(60.0)
        rig.assert_untouched(before)
        assert (await rig.coordinator.operation("op-1")).state is OperationState.REJECTED
        assert (await rig.coordinator.model("chat")).state is ModelState.AWAKE

    rig.run(story)


def test_without_a_journal_a_gate_that_a_refused_stage_has_left_closed_is_released(rig: Rig) -> None:
    """M6: no rank has anything staged, and yet the leader waits for a word."""

    async def story() -> None:
        before = rig.free_bytes()
        rig.chat[0].fault("stage", Fault.REFUSE)
        for follower in rig.chat[1:]:
            follower.fault("stage", Fault.HANG)
            follower.fault("abort", Fault.HANG, 1000)
        await rig.coordinator.submit(SLEEP)
        await asyncio.sleep(1.0)
        assert all(rank.ledger.phase is LedgerPhase.IDLE for rank in rig.chat) and not rig.gate_open()
        await lose_journal(rig)
        rig.assert_untouched(before)
        assert (await rig.coordinator.operation("op-1")).state is OperationState.REJECTED
        assert (await rig.coordinator.model("chat")).state is ModelState.AWAKE
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED

    rig.run(story)


async def lose_journal(rig: Rig) -> None:
    """A new and empty journal; ranks have seen the old one's epochs."""
    await rig.stop()
    for rank in rig.chat:
        rank._faults.clear()
    rig.journal_path = rig.journal_path.with_name("another.db")
    await rig.start()


def test_the_epoch_rises_and_ranks_refuse_the_old_one(rig: Rig) -> None:
    async def story() -> None:
        old = rig.coordinator
        await rig.do(SLEEP)
        await rig.restart()
        assert rig.coordinator.epoch == old.epoch + 1
        await rig.do(WAKE)
        assert {rank.epoch for rank in rig.chat} == {rig.coordinator.epoch}

    rig.run(story)


def test_a_new_journal_takes_an_epoch_above_all_that_ranks_have_seen(rig: Rig) -> None:
    """M6: else ranks would refuse the coordinator for ever, and never the old one's late calls."""

    async def story() -> None:
        for _ in range(3):
            await rig.restart()
        await rig.do(SLEEP)
        seen = max(rank.epoch for rank in rig.chat)
        await lose_journal(rig)
        assert rig.coordinator.epoch > seen
        assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED
        taken = rig.coordinator.epoch
        await rig.restart()
        assert rig.coordinator.epoch > taken, "the journal has kept it"

    rig.run(story)


def test_ranks_refuse_the_old_coordinator_from_the_moment_the_new_one_asks(rig: Rig) -> None:
    """M6: nothing of an operation is on its way yet, so that no call of the new one would tell them."""

    async def story() -> None:
        old = rig.coordinator.epoch
        await rig.restart()
        assert {rank.epoch for rank in rig.chat} == {rig.coordinator.epoch} and rig.coordinator.epoch > old
        late = await rig.chat[0].drain(PhaseCall("op-late", Phase.DRAIN, old), DrainSpec(), 1.0, 60.0)
        assert not late.ok and "is over" in late.refusals[0].reason
        assert rig.gate_open()

    rig.run(story)


def test_a_rank_that_is_silent_at_the_start_and_has_seen_more_raises_the_epoch_later(rig: Rig) -> None:
    async def story() -> None:
        await rig.stop()
        for rank in rig.chat:
            rank.epoch = 70
            rank.fault("status", Fault.HANG, 2)
        await rig.start()
        await asyncio.sleep(60.0)
        assert rig.coordinator.epoch > 70
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED

    rig.run(story)
