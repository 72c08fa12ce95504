"""Every pair of operations on one model, one asked for while the other is on its way: the ends, as a table (C1, C4)."""

from __future__ import annotations

import asyncio

import pytest
from coordinator_memory_journal import JournalStore
from coordinator_rig import CONFIG, PATIENCE_S, SLEEP, WAKE, MemoryRig, asking

from torpor.actors.messages import Kind, LedgerPhase, ModelState, OnConflict, OperationRequest, OperationState

REQUESTS = {
    "sleep": SLEEP,
    "sleep_weights": asking(Kind.SLEEP, tags=("weights",)),
    "wake": WAKE,
    "update": asking(Kind.UPDATE, weights_path="/weights/new"),
    "recover": asking(Kind.RECOVER),
    "delete": asking(Kind.DELETE),
}
ASLEEP_FIRST = ("wake",)  # the first one is asked of a model that sleeps
FAILED_FIRST = ("recover",)  # … that has failed
SLOW = dict.fromkeys(("preflight", "stage", "commit"), 0.5)
JOINS, HAPPENS = "joins", "happens"  # as one operation; after the first
# An update joins no other: its path says nothing of what is there by now.
# What becomes of the second (columns) with on_conflict wait; a code: it is rejected.
#             sleep        sleep_weights  wake       update         recover    delete
AFTER = {
    "sleep": (JOINS, HAPPENS, HAPPENS, "wrong_state", HAPPENS, HAPPENS),
    "sleep_weights": (HAPPENS, JOINS, HAPPENS, "wrong_state", HAPPENS, HAPPENS),
    "wake": (HAPPENS, HAPPENS, JOINS, HAPPENS, HAPPENS, HAPPENS),
    "update": (HAPPENS, HAPPENS, HAPPENS, HAPPENS, HAPPENS, HAPPENS),
    "recover": (HAPPENS, HAPPENS, HAPPENS, HAPPENS, JOINS, HAPPENS),
    "delete": ("unknown_model",) * 5 + (JOINS,),
}
# With on_conflict reject only what is the same joins; where the state forbids it at once, that is the reason.
AT_ONCE = {
    (first, second): JOINS if first == second != "update" else "conflict"
    for first in REQUESTS
    for second in REQUESTS
}
AT_ONCE |= {("recover", second): "wrong_state" for second in REQUESTS if second not in ("recover", "delete")}
AT_ONCE |= {("delete", second): "unknown_model" for second in REQUESTS if second != "delete"}
ROWS = [
    pytest.param(first, second, OnConflict.WAIT, AFTER[first][column], id=f"{first}-{second}-wait")
    for first in REQUESTS
    for column, second in enumerate(REQUESTS)
] + [
    pytest.param(*pair, OnConflict.REJECT, end, id="-".join((*pair, "reject")))
    for pair, end in AT_ONCE.items()
]


async def prepared(rig: MemoryRig, first: str) -> None:
    if first in ASLEEP_FIRST:
        await rig.do(SLEEP)
    if first in FAILED_FIRST:
        rig.chat[1].die()
        await rig.coordinator.fail("chat", "a rank has died")
    for rank in rig.chat:
        rank.delay_s = dict(SLOW)
    assert rig.maker is not None
    rig.maker.delay_s = {"make": 0.5, "end": 0.5}


def assert_whole(rig: MemoryRig) -> None:
    """Whatever came last, all ranks are in one state, and the gate is open where it may be."""
    assert rig.coordinator.reserved_bytes() == 0
    if "chat" not in rig.cluster.ranks:
        assert list(rig.coordinator._models) == ["solo"]
        return
    parked = rig.parked()
    assert all(each == parked[0] for each in parked)
    assert all(rank.ledger.phase is LedgerPhase.IDLE and not rank.dead for rank in rig.chat)
    state = ModelState.ASLEEP if parked[0] else ModelState.AWAKE
    assert rig.coordinator.published_state("chat") is state and rig.gate_open() is not bool(parked[0])


@pytest.mark.parametrize(("first", "second", "on_conflict", "end"), ROWS)
def test_two_operations_on_one_model_end_as_the_table_says(
    first: str, second: str, on_conflict: OnConflict, end: str
) -> None:
    rig = MemoryRig(JournalStore(), CONFIG)
    rig.with_maker()

    async def ask(name: str, wait: OnConflict) -> str:
        wish: OperationRequest = asking(REQUESTS[name].kind, **_fields(name), on_conflict=wait)
        return (await rig.coordinator.submit(wish)).id

    async def story() -> None:
        await prepared(rig, first)
        one = await ask(first, OnConflict.REJECT)
        await asyncio.sleep(0.25)
        assert (await rig.coordinator.operation(one)).state is OperationState.RUNNING, "it was over too soon"
        other = await ask(second, on_conflict)
        assert (one == other) is (end == JOINS)
        outcomes = [await rig.coordinator.wait(each, PATIENCE_S) for each in (one, other)]
        assert outcomes[0].state is OperationState.SUCCEEDED, outcomes[0].reason
        if end in (JOINS, HAPPENS):
            assert outcomes[1].state is OperationState.SUCCEEDED, outcomes[1].reason
        else:
            assert (outcomes[1].state, outcomes[1].code) == (OperationState.REJECTED, end)
            assert outcomes[1].reason
        if end == HAPPENS and outcomes[1].phases:
            ended = outcomes[0].finished_at
            assert ended is not None and all(phase.started_at >= ended for phase in outcomes[1].phases)
        assert_whole(rig)

    rig.run(story)


def _fields(name: str) -> dict[str, object]:
    request = REQUESTS[name]
    return {"tags": request.tags, "weights_path": request.weights_path}
