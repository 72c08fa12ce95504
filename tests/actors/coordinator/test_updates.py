"""Weight updates over the ranks of a model: all or none, across deaths, and what is told of them (C9, C10)."""

from __future__ import annotations

import asyncio

import pytest
from coordinator_rig import SLEEP, WAKE, Rig, asking

from torpor.actors.coordinator import Fault, MemoryRank
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    GateReason,
    Kind,
    LedgerPhase,
    ModelState,
    OnConflict,
    Operation,
    OperationState,
    RejectCode,
    RestoreMode,
)

UPDATE = asking(Kind.UPDATE, tags=("weights",), weights_path="/weights/new")


def versions(rig: Rig) -> list[int]:
    return [rank.ledger.weights_version for rank in rig.chat]


async def version_shown(rig: Rig) -> int:
    return (await rig.coordinator.model("chat")).weights_version


def test_an_update_reaches_all_ranks_behind_a_closed_gate_and_raises_the_version(rig: Rig) -> None:
    """C10."""

    async def story() -> None:
        seen: list[tuple[ModelState, GateReason | None]] = []

        def look(moment: str, method: str, rank: MemoryRank) -> None:
            if (moment, method) == ("before", "commit"):
                view = rig.coordinator._models["chat"].view()
                seen.append((view.state, view.gate_reason))
                assert not rig.gate_open()

        for rank in rig.chat:
            rank.on_call = look
        before = rig.free_bytes()
        for number in (1, 2):
            done = await rig.do(UPDATE)
            assert (done.state, done.weights_version) == (OperationState.SUCCEEDED, number), done
            assert (versions(rig), await version_shown(rig)) == ([number] * 3, number)
        assert seen == [(ModelState.AWAKE, GateReason.DRAINING)] * 6
        rig.assert_untouched(before)
        await rig.restart()
        assert await version_shown(rig) == 2
        assert (await rig.coordinator.operations("chat"))[0].weights_version == 2

    rig.run(story)


def test_an_update_ends_undefined_contents_with_the_kv_cache_asleep(rig: Rig) -> None:
    """C9, C10: refused while the weights sleep, too."""

    async def story() -> None:
        none = {"weights": RestoreMode.NONE}
        await rig.do(asking(Kind.SLEEP, restore=none))
        refused = await rig.do(UPDATE)
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.WRONG_STATE)
        assert "wake" in (refused.reason or "")
        await rig.do(asking(Kind.WAKE, tags=("weights",)))
        assert (await rig.do(UPDATE)).state is OperationState.SUCCEEDED
        view = await rig.coordinator.model("chat")
        assert (view.state, view.parked_tags) == (ModelState.ASLEEP, ["kv_cache"])
        assert view.hold, "it is held asleep as before"
        assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED
        view = await rig.coordinator.model("chat")
        assert (view.state, view.gate_open, view.weights_version) == (ModelState.AWAKE, True, 1)

    rig.run(story)


@pytest.mark.parametrize("method", ["preflight", "stage"])
def test_one_rank_of_three_that_refuses_keeps_all_from_writing(rig: Rig, method: str) -> None:
    """C10, C6."""

    async def story() -> None:
        before = rig.free_bytes()
        rig.chat[2].fault(method, Fault.REFUSE)
        done = await rig.do(UPDATE)
        assert done.state is OperationState.REJECTED and "rank 2 refuses" in (done.reason or "")
        assert (versions(rig), await version_shown(rig)) == ([0, 0, 0], 0)
        rig.assert_untouched(before)

    rig.run(story)


def test_ranks_that_have_read_different_weights_do_not_write_them(rig: Rig) -> None:
    """M7."""

    async def story() -> None:
        rig.chat[1].fault("stage", Fault.OTHER_DIGEST)
        done = await rig.do(UPDATE)
        assert (done.state, done.code) == (OperationState.REJECTED, RejectCode.DIGEST_MISMATCH)
        assert versions(rig) == [0, 0, 0] and rig.gate_open()

    rig.run(story)


def test_a_write_that_fails_on_one_rank_until_the_deadline_makes_the_model_failed(rig: Rig) -> None:
    """C10, F6."""

    async def story() -> None:
        rig.chat[1].fault("commit", Fault.REFUSE, 10_000)
        done = await rig.do(UPDATE)
        assert done.state is OperationState.FAILED and done.weights_version is None
        view = await rig.coordinator.model("chat")
        assert (view.state, view.gate_open, view.weights_version) == (ModelState.FAILED, False, 0)
        assert not rig.gate_open()
        refused = await rig.do(UPDATE)
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.WRONG_STATE)

    rig.run(story)


@pytest.mark.parametrize(
    ("method", "moment", "version"),
    [
        ("preflight", "after", 0),
        ("drain", "after", 0),
        ("stage", "before", 0),
        ("commit", "before", 1),
        ("commit", "after", 1),
        ("publish", "before", 1),
    ],
)
def test_a_coordinator_that_dies_leaves_an_update_whole_or_undone(
    rig: Rig, method: str, moment: str, version: int
) -> None:
    """M6: before the decision nothing is written, after it everything."""

    async def story() -> None:
        dead = asyncio.Event()

        def die(when: str, called: str, rank: MemoryRank) -> None:
            if (when, called, rank.rank) == (moment, method, 0) and not dead.is_set():
                dead.set()
                for each in rig.chat:  # nobody hears what is answered now
                    each.fault(method, Fault.LOSE)

        for rank in rig.chat:
            rank.on_call = die
        begun = await rig.coordinator.submit(UPDATE)
        await dead.wait()
        await rig.stop()
        for rank in rig.chat:
            rank.on_call = None
            rank._faults.clear()
        await rig.start()
        done = await rig.coordinator.wait(begun.id, 1000.0)
        wanted = OperationState.SUCCEEDED if version else OperationState.REJECTED
        assert done.state is wanted, done
        await asyncio.sleep(200.0)
        assert (versions(rig), await version_shown(rig)) == ([version] * 3, version)
        assert rig.gate_open()
        assert {rank.ledger.phase for rank in rig.chat} == {LedgerPhase.IDLE}

    rig.run(story)


@pytest.mark.parametrize(("method", "written"), [("stage", False), ("commit", True)])
def test_a_rank_that_dies_fails_the_model_and_the_others_agree(rig: Rig, method: str, written: bool) -> None:
    async def story() -> None:
        rig.chat[2].fault(method, Fault.DIE)
        done = await rig.do(UPDATE)
        assert done.state is OperationState.FAILED
        assert versions(rig)[:2] == [int(written)] * 2
        view = await rig.coordinator.model("chat")
        assert (view.state, view.weights_version) == (ModelState.FAILED, 0)

    rig.run(story)


def test_an_update_waits_for_what_runs_or_freezes_it_and_joins_no_other(rig: Rig) -> None:
    """C4, G2: the path may hold other weights by now."""

    async def story() -> None:
        rig.chat[0].gate.running = 2
        late = await rig.do(asking(Kind.UPDATE, weights_path="/w", drain=DrainSpec(timeout_s=0.5)))
        assert (late.state, late.code) == (OperationState.REJECTED, RejectCode.DRAIN_TIMEOUT)
        assert versions(rig) == [0, 0, 0]
        frozen = asking(Kind.UPDATE, weights_path="/w", drain=DrainSpec(DrainMode.FREEZE))
        rig.chat[0].delay_s["stage"] = 1.0
        first = await rig.coordinator.submit(frozen)
        second = await rig.coordinator.submit(frozen)
        assert (second.state, second.code) == (OperationState.REJECTED, RejectCode.CONFLICT)
        waiting = asking(Kind.UPDATE, weights_path="/w", drain=frozen.drain, on_conflict=OnConflict.WAIT)
        third = await rig.coordinator.submit(waiting)
        assert third.id != first.id
        ends: list[Operation] = [await rig.coordinator.wait(one.id) for one in (first, third)]
        assert [one.weights_version for one in ends] == [1, 2]
        assert (await rig.do(SLEEP)).state is OperationState.REJECTED  # two still run

    rig.run(story)


def test_a_dry_run_of_an_update_writes_nothing_and_closes_nothing(rig: Rig) -> None:
    """C8."""

    async def story() -> None:
        done = await rig.do(asking(Kind.UPDATE, weights_path="/w", dry_run=True))
        assert (done.state, done.weights_version) == (OperationState.SUCCEEDED, None)
        assert versions(rig) == [0, 0, 0]
        assert "drain" not in rig.chat[0].calls

    rig.run(story)
