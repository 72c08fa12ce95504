"""What is in doubt is asked again until it is known, though the journal cannot be written now and then (C6, M6)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from coordinator_crash import CrashPoint
from coordinator_memory_journal import JournalStore, MemoryJournal
from coordinator_rig import CONFIG, PATIENCE_S, SLEEP, WAKE, MemoryRig, asking
from coordinator_virtual_time import run

from torpor.actors.config import RecoverPolicy
from torpor.actors.coordinator import Fault
from torpor.actors.coordinator.records import Published
from torpor.actors.messages import (
    Kind,
    LedgerPhase,
    ModelState,
    OnConflict,
    Operation,
    OperationRequest,
    OperationState,
)

WRITES = ("_unfinished", "_is_decided", "_begin", "_decide", "_finish")


def test_a_model_that_is_ready_is_not_asked_once_more_by_who_found_it_in_doubt() -> None:
    """It would be `recovering` for as long as its ranks take to answer, and refuse what is asked of it."""
    rig = MemoryRig(JournalStore())

    async def story() -> None:
        rig.chat[1].delay_s["status"] = 60.0
        for _ in range(2):
            await rig.coordinator.attach("chat", rig.chat)
        assert rig.coordinator.published_state("chat") is ModelState.RECOVERING
        rig.chat[1].delay_s["status"] = 0.3
        states = []
        for _ in range(1000):
            await asyncio.sleep(0.1)
            states.append(rig.coordinator.published_state("chat"))
        first = states.index(ModelState.AWAKE)
        assert set(states[first:]) == {ModelState.AWAKE}, states[first:].index(ModelState.RECOVERING) / 10

    rig.run(story)


def test_a_model_is_loading_until_it_is_awake_for_the_first_time() -> None:
    """Nobody recovers anything while its ranks are asked how they are."""
    rig = MemoryRig(JournalStore())

    async def story() -> None:
        await rig.prepare()
        rig.chat[1].delay_s["status"] = 0.3
        starting = asyncio.create_task(rig.coordinator.start())
        states = []
        while not starting.done():
            await asyncio.sleep(0.1)
            states.append(rig.coordinator.published_state("chat"))
        assert states[0] is ModelState.LOADING and states[-1] is ModelState.AWAKE
        assert set(states) == {ModelState.LOADING, ModelState.AWAKE}
        await rig.stop()

    run(story())


def test_a_request_that_is_written_down_while_its_model_is_settled_is_not_taken_for_one_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end would be written as cancelled, and it would be carried out all the same (C6)."""
    rig = MemoryRig(JournalStore())
    ends: list[tuple[str, OperationState]] = []
    really = MemoryJournal.finish

    async def noted(journal: MemoryJournal, operation: Operation, publishes: Published | None = None) -> None:
        ends.append((operation.id, operation.state))
        await really(journal, operation, publishes)

    monkeypatch.setattr(MemoryJournal, "finish", noted)

    async def story() -> None:
        rig.store.latency_s = lambda: 0.05
        ids = []
        for moment in range(12):
            wish = asking(Kind.WAKE if moment % 2 else Kind.SLEEP, on_conflict=OnConflict.WAIT)
            asked = asyncio.create_task(rig.coordinator.submit(wish))
            await asyncio.sleep(0.01 * moment)
            await rig.coordinator.attach("chat", rig.chat)  # is settled anew
            ids.append((await asked).id)
            await rig.coordinator.wait(ids[-1], PATIENCE_S)
        assert ends == [(operation, OperationState.SUCCEEDED) for operation in ids]

    rig.run(story)


@pytest.mark.parametrize("write", WRITES)
def test_a_model_in_doubt_is_settled_though_the_journal_could_not_be_used_at_first(write: str) -> None:
    """The journal was lost with a commit half done, so that all of its work is called for once."""

    async def whole() -> None:
        rig = MemoryRig(JournalStore())
        await rig.start()
        await die_between_two_commits(rig)
        rig.store = JournalStore()
        rig.chat[2].delay_s["status"] = 60.0
        await rig.start()
        try:
            assert rig.coordinator.published_state("chat") is ModelState.RECOVERING
            rig.store.refusals[write] = 2
            rig.chat[2].delay_s = {}
            await asyncio.sleep(120.0)
            assert not rig.store.refusals[write], "it was called for"
            assert rig.coordinator.published_state("chat") is ModelState.ASLEEP
            assert all(rank.ledger.phase is LedgerPhase.IDLE and rank.ledger.parked for rank in rig.chat)
            (operation,) = await rig.coordinator.operations("chat")
            assert operation.state is OperationState.SUCCEEDED
            assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED
            await rig.restart()
            assert rig.coordinator.published_state("chat") is ModelState.AWAKE
        finally:
            await rig.stop()

    run(whole())


@pytest.mark.parametrize("is_heard", [True, False], ids=["all answer", "one is silent at the end"])
def test_nobody_hears_of_a_success_while_the_model_is_called_failed_still(is_heard: bool) -> None:
    """C6: who asks for more then would be refused, of a model that is well. Followers hear of both ends, too."""

    async def whole() -> None:
        rig = MemoryRig(JournalStore())
        await rig.start()
        await die_between_two_commits(rig)
        await MemoryJournal(rig.store).publish(Published("chat", failed="called so by whoever died"))
        rig.chat[2].delay_s["status"] = 60.0
        coordinator = await rig.start()
        rig.chat[2].delay_s = {}
        for rank in rig.chat:
            rank.delay_s = {"commit": 0.4, "publish": 0.4, "status": 0.4}
        waiting = asyncio.create_task(coordinator.wait("op-1", PATIENCE_S))
        start, told, heard = (await coordinator.changes(None, 0.0)).until, [], is_heard
        try:
            while not waiting.done():
                await asyncio.sleep(0.05)
                (listed,), found = await coordinator.operations("chat"), await coordinator.operation("op-1")
                ended = not listed.state is found.state is OperationState.RUNNING
                told.append((ended, coordinator.published_state("chat")))
                if rig.chat[2].ledger.phase is LedgerPhase.IDLE and not heard:
                    heard = True
                    rig.chat[2].delay_s["status"] = 60.0
                    asyncio.get_running_loop().call_later(15.0, rig.chat[2].delay_s.clear)
            outcome = await waiting
            assert outcome.state is OperationState.SUCCEEDED
            assert coordinator.published_state("chat") is ModelState.ASLEEP
            assert (True, ModelState.FAILED) not in told and (False, ModelState.FAILED) in told
            told_of = [one.operation.state for one in coordinator.feed.since(start).changes if one.operation]
            assert told_of[-1] is OperationState.SUCCEEDED
            assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED
        finally:
            await rig.stop()

    run(whole())


async def die_between_two_commits(rig: MemoryRig) -> None:
    rig.chat[1].delay_s["commit"] = rig.chat[2].delay_s["commit"] = 3.0
    point = CrashPoint(rig, 0)
    point.name_at = "after commit of chat/0"
    work = asyncio.create_task(rig.do(SLEEP))
    point.arm(work)
    await point.dead.wait()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    point.disarm()
    rig.chat[1].dead = rig.chat[2].dead = True  # what it has sent them is lost
    await asyncio.sleep(10.0)
    for rank in rig.chat:
        rank.dead, rank.delay_s = False, {}
    await rig.stop()
    assert [rank.ledger.phase for rank in rig.chat] == [LedgerPhase.COMMITTED, *[LedgerPhase.STAGED] * 2]


def making_rig(policy: RecoverPolicy) -> MemoryRig:
    models = tuple(replace(model, recover=policy) for model in CONFIG.models)
    rig = MemoryRig(JournalStore(), replace(CONFIG, models=models))
    rig.with_maker()
    return rig


@pytest.mark.parametrize("write", ["_unfinished", "_finish"])
def test_a_recovery_ends_though_the_journal_could_not_be_used_at_first(write: str) -> None:
    rig = making_rig(RecoverPolicy.MANUAL)

    async def story() -> None:
        rig.chat[1].die()
        await asyncio.sleep(3.0)
        rig.store.refusals[write] = 1
        recovery = await rig.do(asking(Kind.RECOVER))
        assert recovery.state is OperationState.SUCCEEDED and not rig.store.refusals[write]
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED

    rig.run(story)


@pytest.mark.parametrize("write", ["_publish", "_begin"])
def test_the_next_death_of_a_rank_is_seen_after_one_that_could_not_be_written(write: str) -> None:
    """M6: reached without a person."""
    rig = making_rig(RecoverPolicy.AUTO)

    async def story() -> None:
        rig.store.refusals[write] = 1
        for _ in range(2):
            rig.chat[1].die()
            await asyncio.sleep(90.0)
            assert rig.coordinator.published_state("chat") is ModelState.AWAKE
            assert not any(rank.dead for rank in rig.chat) and rig.gate_open()

    rig.run(story)


def test_an_outcome_that_could_not_be_written_is_so_when_the_disk_has_room_again() -> None:
    """C6: neither the list nor the next coordinator takes it for one that runs; G6: nor is the hold lost."""
    rig = MemoryRig(JournalStore())

    async def story() -> None:
        rig.store.refusals["_finish"] = 3
        sleep = await rig.do(replace(SLEEP, caller="trainer"))
        assert sleep.state is OperationState.SUCCEEDED
        (listed,) = await rig.coordinator.operations("chat")
        assert listed.state is OperationState.SUCCEEDED
        await asyncio.sleep(60.0)
        assert not await rig.journal.unfinished()
        await rig.restart()
        (hold,) = (await rig.coordinator.model("chat")).holds
        assert (hold.operation, hold.by) == (sleep.id, "trainer")
        assert (await rig.coordinator.operation(sleep.id)).ranks == sleep.ranks

    rig.run(story)


def test_a_wake_with_nothing_to_do_tells_no_reason_though_a_rank_did_not_hear_of_its_end() -> None:
    rig = MemoryRig(JournalStore())

    async def story() -> None:
        rig.chat[1].fault("abort", Fault.REFUSE)
        wake = await rig.do(WAKE)
        assert (wake.state, wake.code, wake.reason) == (OperationState.SUCCEEDED, None, None)

    rig.run(story)


@pytest.mark.parametrize("decided", [False, True])
def test_what_was_left_open_on_a_model_that_is_gone_comes_to_an_end(decided: bool) -> None:
    """C6: one that waited for the deletion, and whose end could not be written before the coordinator died."""
    rig = MemoryRig(JournalStore())

    async def story() -> None:
        left = Operation("op-0", Kind.SLEEP, "gone", OperationState.RUNNING, [], {}, created_at=rig.now_s)
        await rig.journal.begin(left, OperationRequest(Kind.SLEEP, "gone"), rig.now_s)
        if decided:
            await rig.journal.decide(left.id)
        await rig.restart()
        ended = await rig.coordinator.wait(left.id, 1.0)
        state = OperationState.FAILED if decided else OperationState.REJECTED
        assert ended.state is state and "gone" in str(ended.reason) and ended.finished_at

    rig.run(story)
