"""Every message of an operation goes wrong in every way, at every rank and at the coordinator; the ends, as a table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from enum import StrEnum

import pytest
from coordinator_crash import CrashPoint
from coordinator_memory_journal import JournalStore
from coordinator_rig import RANK_BYTES, SLEEP, MemoryRig, asking
from coordinator_wire import LATE_S, Mishap, WiredRig

from torpor.actors.coordinator import Fault
from torpor.actors.messages import Kind, LedgerPhase, ModelState, OperationState

RANKS = (0, 1, 2)
KINDS = (Kind.SLEEP, Kind.WAKE)
BOTH = {"kv_cache", "weights"}


class End(StrEnum):
    """As the contract names them; in the last two the model is failed and its gate closed."""

    DONE = "done"
    UNDONE = "undone"  # rejected: memory, tags and gate as before
    FAILED_BACK = "failed_back"  # the other ranks are as before
    FAILED_FORWARD = "failed_forward"  # the other ranks have committed


class Message(StrEnum):
    PREFLIGHT = "preflight"
    WITHDRAW = "withdraw"  # the abort after another rank has refused in preflight
    DRAIN = "drain"
    STAGE = "stage"
    DOUBT = "doubt"  # the status after a stage that was not answered
    ABORT = "abort"  # after another rank has refused its stage
    COMMIT = "commit"
    PUBLISH = "publish"


METHOD = {Message.DOUBT: "status", Message.WITHDRAW: "abort"}
UNHEARD = (Mishap.LOST, Mishap.LATE)
NO_ANSWER = (Mishap.ANSWER_LOST, Mishap.ANSWER_LATE)
NOT_OURS = (Mishap.WRONG_EPOCH, Mishap.WRONG_OPERATION, Mishap.WRONG_PHASE, Mishap.WRONG_RANK)
DROPPED = (*NO_ANSWER, *NOT_OURS, Mishap.WRONG_INCARNATION)
DEATHS = (Mishap.DIES_BEFORE, Mishap.DIES_AFTER)


def ends(end: End, *mishaps: Mishap) -> dict[Mishap, End]:
    return dict.fromkeys(mishaps, end)


_HARMLESS = ends(End.DONE, Mishap.DOUBLED)
_BEFORE_STAGE = ends(End.UNDONE, *UNHEARD, *DROPPED) | ends(End.FAILED_BACK, *DEATHS, Mishap.DIES_ANSWERED)
_DRIVEN_FORWARD = ends(End.DONE, *UNHEARD, *DROPPED) | ends(End.FAILED_FORWARD, *DEATHS)
_DRIVEN_BACK = ends(End.UNDONE, *UNHEARD, *DROPPED, Mishap.DOUBLED) | ends(End.FAILED_BACK, *DEATHS)
# Who dies when it has answered its last message is missed by the watch, as one that dies between operations.
TABLE: dict[Message, dict[Mishap, End]] = {
    Message.PREFLIGHT: _HARMLESS | _BEFORE_STAGE | ends(End.UNDONE, Mishap.WRONG_DIGEST),
    Message.WITHDRAW: _DRIVEN_BACK,
    Message.DRAIN: _HARMLESS | _BEFORE_STAGE,
    # What was staged all the same is told by the rank's status; who died with its yes is missed at the commit.
    Message.STAGE: _HARMLESS
    | ends(End.UNDONE, *UNHEARD, Mishap.WRONG_DIGEST)
    | ends(End.DONE, *DROPPED)
    | ends(End.FAILED_BACK, *DEATHS)
    | ends(End.FAILED_FORWARD, Mishap.DIES_ANSWERED),
    Message.DOUBT: _HARMLESS
    | ends(End.UNDONE, *UNHEARD, *NO_ANSWER, Mishap.WRONG_RANK, Mishap.WRONG_OPERATION, Mishap.WRONG_DIGEST)
    | ends(End.FAILED_BACK, *DEATHS, Mishap.WRONG_INCARNATION)
    | ends(End.FAILED_FORWARD, Mishap.DIES_ANSWERED),
    Message.ABORT: _DRIVEN_BACK,
    Message.COMMIT: _HARMLESS | _DRIVEN_FORWARD | ends(End.FAILED_FORWARD, Mishap.DIES_ANSWERED),
    Message.PUBLISH: _HARMLESS | _DRIVEN_FORWARD,
}
# The coordinator dies while the message is on its way, or when it is done and not answered (the in-doubt table).
COORDINATOR_DIES = {
    message: End.DONE if message in (Message.COMMIT, Message.PUBLISH) else End.UNDONE
    for message in Message
    if message is not Message.DOUBT
}


def is_sent(kind: Kind, message: Message, rank: int) -> bool:
    return message is not Message.DRAIN or (kind is Kind.SLEEP and rank == 0)


def rows() -> Iterator[object]:
    for kind in KINDS:
        for message, row in TABLE.items():
            for rank in RANKS:
                for mishap, end in row.items() if is_sent(kind, message, rank) else ():
                    yield pytest.param(
                        kind, message, mishap, rank, end, id=f"{kind}-{message}-{mishap}-{rank}"
                    )


def crash_rows() -> Iterator[object]:
    for kind in KINDS:
        for message, end in COORDINATOR_DIES.items():
            for rank in RANKS:
                for moment in ("before", "after") if is_sent(kind, message, rank) else ():
                    yield pytest.param(
                        kind, message, moment, rank, end, id=f"{kind}-{message}-{moment}-{rank}"
                    )


def lead_up_to(rig: MemoryRig, message: Message, rank: int) -> None:
    """What makes the coordinator send it, where all goes well otherwise."""
    another = rig.chat[(rank + 1) % len(RANKS)]
    if message is Message.WITHDRAW:
        another.fault("preflight", Fault.REFUSE)
    elif message is Message.ABORT:
        another.fault("stage", Fault.REFUSE)


def assert_ended(rig: MemoryRig, kind: Kind, end: End, lost: int) -> None:
    """lost: the rank that may be dead, or taken for it."""
    was_asleep = kind is Kind.WAKE
    asleep = was_asleep if end in (End.UNDONE, End.FAILED_BACK) else not was_asleep
    failed = end in (End.FAILED_BACK, End.FAILED_FORWARD)
    for rank in rig.chat:
        if failed and rank.rank == lost:
            continue
        assert set(rank.ledger.parked) == (BOTH if asleep else set()), f"rank {rank.rank}"
        assert rank.device.used[rank.ledger.owner] == (0 if asleep else RANK_BYTES)
        assert rank.ledger.phase in (
            (LedgerPhase.IDLE, LedgerPhase.COMMITTED) if end is End.FAILED_FORWARD else (LedgerPhase.IDLE,)
        )
    assert rig.gate_open() is not (asleep or failed)
    assert rig.coordinator.reserved_bytes() == 0
    state = ModelState.ASLEEP if asleep else ModelState.AWAKE
    assert rig.coordinator.published_state("chat") is (ModelState.FAILED if failed else state)


OUTCOME = {End.DONE: OperationState.SUCCEEDED, End.UNDONE: OperationState.REJECTED}


@pytest.mark.parametrize(("kind", "message", "mishap", "rank", "end"), list(rows()))
def test_a_message_that_goes_wrong_ends_as_the_table_says(
    kind: Kind, message: Message, mishap: Mishap, rank: int, end: End
) -> None:
    """F8, M6, M7, C6; what comes late comes after the end, and changes nothing."""
    rig = WiredRig(JournalStore())

    async def story() -> None:
        if kind is Kind.WAKE:
            await rig.do(SLEEP)
        lead_up_to(rig, message, rank)
        wrong = {(METHOD.get(message, message.value), 1): mishap}
        if message is Message.DOUBT:
            wrong = {("stage", 1): Mishap.ANSWER_LOST, ("status", 1): mishap}
        rig.wires[rank].arm(wrong)
        operation = await rig.do(asking(kind))
        assert rig.wires[rank].met == list(wrong.values()), "the message was not sent"
        assert operation.state is OUTCOME.get(end, OperationState.FAILED), operation.reason
        await asyncio.sleep(2 * LATE_S)
        assert_ended(rig, kind, end, rank)
        if end is End.UNDONE:
            assert (await rig.do(asking(kind))).state is OperationState.SUCCEEDED, "a retry works"
            assert_ended(rig, kind, End.DONE, rank)

    rig.run(story)


@pytest.mark.parametrize(("kind", "message", "moment", "rank", "end"), list(crash_rows()))
def test_a_coordinator_that_dies_over_a_message_leaves_what_the_table_says(
    kind: Kind, message: Message, moment: str, rank: int, end: End
) -> None:
    """F25, M6: nobody but the next coordinator ends it."""
    rig = MemoryRig(JournalStore())

    async def story() -> None:
        if kind is Kind.WAKE:
            await rig.do(SLEEP)
        lead_up_to(rig, message, rank)
        point = CrashPoint(rig, at=0)
        point.name_at = f"{moment} {METHOD.get(message, message.value)} of chat/{rank}"
        work = asyncio.create_task(rig.do(asking(kind)))
        point.arm(work)
        await point.dead.wait()
        point.disarm()
        await asyncio.gather(work, return_exceptions=True)
        await rig.restart()
        await asyncio.sleep(2 * LATE_S)
        assert_ended(rig, kind, end, rank)
        (operation, *_) = [one for one in await rig.coordinator.operations("chat") if one.kind is kind]
        assert operation.state is OUTCOME[end], operation.reason

    rig.run(story)
