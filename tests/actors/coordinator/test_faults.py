"""One rank refuses, fails, lies, dies or says nothing, in each phase. Others unchanged, outcomes named (F8, C6, M7)."""

from __future__ import annotations

import asyncio

import pytest
from coordinator_rig import RANK_BYTES, SLEEP, WAKE, Rig, asking

from torpor.actors.coordinator import Fault, MemoryRank
from torpor.actors.messages import (
    DrainSpec,
    GateReason,
    Kind,
    LedgerPhase,
    ModelState,
    OperationState,
    PhaseCall,
    PhaseReply,
    RankOutcome,
    RejectCode,
    RestoreMode,
)

FOREVER = 1000

REJECTED = [
    ("preflight", Fault.REFUSE, RejectCode.REFUSED, RankOutcome.REFUSED),
    ("preflight", Fault.RAISE, RejectCode.RANK_FAILED, RankOutcome.FAILED),
    ("preflight", Fault.HANG, RejectCode.STAGE_TIMEOUT, RankOutcome.ABORTED),
    ("preflight", Fault.STALE, RejectCode.STAGE_TIMEOUT, RankOutcome.ABORTED),
    ("preflight", Fault.OTHER_DIGEST, RejectCode.DIGEST_MISMATCH, RankOutcome.ABORTED),
    ("stage", Fault.REFUSE, RejectCode.REFUSED, RankOutcome.FAILED),
    ("stage", Fault.RAISE, RejectCode.RANK_FAILED, RankOutcome.FAILED),
    ("stage", Fault.HANG, RejectCode.STAGE_TIMEOUT, RankOutcome.ABORTED),
    ("stage", Fault.OTHER_DIGEST, RejectCode.DIGEST_MISMATCH, RankOutcome.ABORTED),
]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("method", "fault", "code", "outcome"), REJECTED)
def test_before_the_decision_a_fault_of_one_rank_changes_nothing(
    rig: Rig, method: str, fault: Fault, code: RejectCode, outcome: RankOutcome, rank: int
) -> None:
    async def story() -> None:
        before = rig.free_bytes()
        rig.chat[rank].fault(method, fault)
        operation = await rig.do(SLEEP)
        assert (operation.state, operation.code) == (OperationState.REJECTED, code), operation.reason
        assert operation.ranks[rank].outcome is outcome
        assert {r.outcome for r in operation.ranks if r.rank != rank} == {RankOutcome.ABORTED}
        assert operation.reason
        rig.assert_untouched(before)
        assert (await rig.coordinator.model("chat")).state is ModelState.AWAKE
        assert rig.coordinator.reserved_bytes() == 0
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED, "a retry works"

    rig.run(story)


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.RAISE, Fault.HANG, Fault.LOSE, Fault.STALE])
def test_a_drain_that_goes_wrong_reopens_the_gate(rig: Rig, fault: Fault) -> None:
    async def story() -> None:
        before = rig.free_bytes()
        rig.chat[0].fault("drain", fault)
        operation = await rig.do(SLEEP)
        assert operation.state is OperationState.REJECTED and operation.reason
        rig.assert_untouched(before)
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED

    rig.run(story)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("fault", [Fault.LOSE, Fault.STALE])
def test_a_stage_whose_answer_is_lost_counts_when_status_shows_it(rig: Rig, fault: Fault, rank: int) -> None:
    async def story() -> None:
        rig.chat[rank].fault("stage", fault)
        operation = await rig.do(SLEEP)
        assert operation.state is OperationState.SUCCEEDED, operation.reason
        assert rig.parked() == [{"kv_cache", "weights"}] * 3

    rig.run(story)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_stage_whose_answer_is_lost_does_not_hide_that_its_plan_differs(rig: Rig, rank: int) -> None:
    """M7."""

    async def story() -> None:
        before = rig.free_bytes()
        rig.chat[rank].fault("stage", Fault.LOSE_OTHER_DIGEST)
        operation = await rig.do(SLEEP)
        assert (operation.state, operation.code) == (OperationState.REJECTED, RejectCode.DIGEST_MISMATCH)
        rig.assert_untouched(before)

    rig.run(story)


@pytest.mark.parametrize("kind", [Kind.SLEEP, Kind.WAKE])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["commit", "publish"])
@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.RAISE, Fault.HANG, Fault.LOSE, Fault.STALE])
def test_after_the_decision_a_passing_fault_is_driven_over(
    rig: Rig, kind: Kind, method: str, fault: Fault, rank: int
) -> None:
    async def story() -> None:
        if kind is Kind.WAKE:
            await rig.do(SLEEP)
        rig.chat[rank].fault(method, fault)
        operation = await rig.do(asking(kind))
        assert operation.state is OperationState.SUCCEEDED, operation.reason
        assert rig.parked() == [{"kv_cache", "weights"} if kind is Kind.SLEEP else set()] * 3
        assert rig.gate_open() is (kind is Kind.WAKE)

    rig.run(story)


@pytest.mark.parametrize("kind", [Kind.SLEEP, Kind.WAKE])
@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.RAISE, Fault.HANG])
def test_a_commit_that_never_succeeds_fails_the_model_with_the_gate_closed(
    rig: Rig, fault: Fault, kind: Kind
) -> None:
    async def story() -> None:
        if kind is Kind.WAKE:
            await rig.do(SLEEP)
        rig.chat[1].fault("commit", fault, FOREVER)
        began_s = rig.loop_time()
        operation = await rig.do(asking(kind))
        assert rig.loop_time() - began_s < 15, "the commit's deadline is 10 s"
        assert operation.state is OperationState.FAILED and operation.reason
        outcomes = [rank.outcome for rank in operation.ranks]
        assert outcomes == [RankOutcome.COMMITTED, RankOutcome.UNKNOWN, RankOutcome.COMMITTED]
        if kind is Kind.SLEEP:
            assert [rank.freed_bytes for rank in operation.ranks] == [RANK_BYTES, 0, RANK_BYTES]
        assert not rig.gate_open()
        view = await rig.coordinator.model("chat")
        assert (view.state, view.gate_open) == (ModelState.FAILED, False) and view.error
        refused = await rig.do(WAKE)
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.WRONG_STATE)
        assert (await rig.do(asking(Kind.SLEEP, "solo"))).state is OperationState.SUCCEEDED, "others go on"

    rig.run(story)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("method", ["preflight", "stage"])
@pytest.mark.parametrize("fault", [Fault.DIE, Fault.DIE_AFTER])
def test_a_death_before_the_decision_fails_the_model_and_frees_what_was_staged(
    rig: Rig, method: str, fault: Fault, rank: int
) -> None:
    async def story() -> None:
        rig.chat[rank].fault(method, fault)
        operation = await rig.do(SLEEP)
        assert (operation.state, operation.code) == (OperationState.FAILED, RejectCode.RANK_FAILED)
        assert operation.ranks[rank].outcome is RankOutcome.FAILED and "gone" in (
            operation.ranks[rank].reason or ""
        )
        for other in rig.chat:
            assert other.dead or (other.ledger.phase is LedgerPhase.IDLE and not other.ledger.parked)
            assert not other.ledger.kept
        assert not rig.gate_open(), "nobody may be let in, not even until the watch sees it"
        assert rig.chat[0].gate.reason is GateReason.FAILED
        assert (await rig.coordinator.model("chat")).state is ModelState.FAILED
        assert rig.coordinator.reserved_bytes() == 0

    rig.run(story)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("fault", [Fault.DIE, Fault.DIE_AFTER])
def test_a_death_after_a_sleep_s_decision_lets_the_others_commit(rig: Rig, fault: Fault, rank: int) -> None:
    async def story() -> None:
        rig.chat[rank].fault("commit", fault)
        operation = await rig.do(SLEEP)
        assert operation.state is OperationState.FAILED
        for other, record in zip(rig.chat, operation.ranks, strict=True):
            if other.rank != rank:
                assert record.outcome is RankOutcome.COMMITTED and record.freed_bytes == RANK_BYTES
                assert set(other.ledger.parked) == {"kv_cache", "weights"}
        assert not rig.gate_open()
        view = await rig.coordinator.model("chat")
        assert (view.state, view.gate_reason) == (ModelState.FAILED, GateReason.FAILED)

    rig.run(story)


def test_a_stage_that_cannot_be_taken_back_fails_the_model(rig: Rig) -> None:
    async def story() -> None:
        rig.chat[1].fault("stage", Fault.RAISE)
        rig.chat[2].fault("abort", Fault.REFUSE, FOREVER)
        operation = await rig.do(SLEEP)
        assert (operation.state, operation.code) == (OperationState.FAILED, RejectCode.RANK_FAILED)
        assert operation.ranks[2].outcome is RankOutcome.UNKNOWN
        assert not rig.gate_open()

    rig.run(story)


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.RAISE, Fault.HANG, Fault.LOSE])
def test_an_abort_that_fails_once_is_asked_again(rig: Rig, fault: Fault) -> None:
    async def story() -> None:
        before = rig.free_bytes()
        rig.chat[1].fault("stage", Fault.RAISE)
        rig.chat[2].fault("abort", fault)
        assert (await rig.do(SLEEP)).state is OperationState.REJECTED
        rig.assert_untouched(before)

    rig.run(story)


def test_a_wake_without_room_is_rejected_and_a_later_one_succeeds(rig: Rig) -> None:
    """M4, F5."""

    async def story() -> None:
        await rig.do(SLEEP)
        device = rig.cluster.devices[2]
        device.take("another process", device.free_bytes - RANK_BYTES + 1)
        free = rig.free_bytes()
        for _ in range(3):
            operation = await rig.do(WAKE)
            assert (operation.state, operation.code) == (OperationState.REJECTED, RejectCode.DEVICE_MEMORY)
            assert (operation.needed_bytes, operation.free_bytes) == (RANK_BYTES, RANK_BYTES - 1)
            assert rig.free_bytes() == free and rig.parked() == [{"kv_cache", "weights"}] * 3
        device.give("another process", 1)
        assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED
        assert rig.gate_open()

    rig.run(story)


def test_room_that_goes_between_preflight_and_stage_is_taken_back_on_all_ranks(rig: Rig) -> None:
    async def story() -> None:
        await rig.do(SLEEP)
        free = rig.free_bytes()

        def steal(moment: str, method: str, rank: object) -> None:
            if (moment, method) == ("before", "stage"):
                rig.cluster.devices[1].take("another process", rig.cluster.devices[1].free_bytes)

        rig.chat[1].on_call = steal
        operation = await rig.do(WAKE)
        assert (operation.state, operation.code) == (OperationState.REJECTED, RejectCode.DEVICE_MEMORY)
        assert [rig.free_bytes()[0], rig.free_bytes()[2]] == [free[0], free[2]]
        assert operation.needed_bytes == RANK_BYTES and not rig.gate_open()

    rig.run(story)


def test_a_drain_s_lease_outlasts_all_deadlines_to_the_end_of_an_abort(rig: Rig) -> None:
    """G1: the leader hears of nothing but its drain, while a follower is staged until the last abort is through."""

    async def story() -> None:
        deadlines, leader = rig.config.deadlines, rig.chat[0]
        lease_ends_s: list[float] = []
        open_behind: list[float] = []
        drain = leader.drain

        async def drained(call: PhaseCall, spec: DrainSpec, timeout_s: float, lease_s: float) -> PhaseReply:
            reply = await drain(call, spec, timeout_s, lease_s)
            lease_ends_s.append(rig.loop_time() + lease_s)
            return reply

        def watch(moment: str, method: str, rank: MemoryRank) -> None:
            if method == "stage":
                leader.fault("status", Fault.HANG, FOREVER)  # nor does it tell in doubt
            if any(each.ledger.phase is LedgerPhase.STAGED for each in rig.chat) and rig.gate_open():
                open_behind.append(rig.loop_time())

        leader.drain = drained  # type: ignore[method-assign]
        for method in ("stage", "abort"):
            leader.fault(method, Fault.HANG, FOREVER)
        for rank in rig.chat:
            rank.on_call = watch
        rig.chat[1].fault("abort", Fault.REFUSE, FOREVER)  # asked again until the deadline
        rig.solo.delay_s = {"stage": deadlines.stage_s - 2.0}  # it has the device, nearly too long
        other = await rig.coordinator.submit(asking(Kind.SLEEP, "solo"))
        await asyncio.sleep(1.0)
        began_s = rig.loop_time()
        operation = await rig.do(SLEEP)
        assert operation.state is OperationState.FAILED
        took_s = rig.loop_time() - began_s
        assert took_s > 2 * deadlines.stage_s + deadlines.commit_s - 4.0, "the deadlines were not used up"
        assert rig.loop_time() < lease_ends_s[0] and not open_behind and not rig.gate_open()
        assert (await rig.coordinator.wait(other.id, 1.0)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_a_sleep_of_which_no_rank_tells_afterwards_keeps_nothing_where_that_was_asked(rig: Rig) -> None:
    """C9: the weights are not called there when they sleep without contents, and the status after it is lost."""

    async def story() -> None:
        rig.solo.delay_s["publish"] = 1.0
        asked = asking(Kind.SLEEP, "solo", restore={"weights": RestoreMode.MEMSET})
        sleep = await rig.coordinator.submit(asked)
        await asyncio.sleep(0.5)
        rig.solo.fault("status", Fault.HANG)
        assert (await rig.coordinator.wait(sleep.id, 60.0)).state is OperationState.SUCCEEDED
        view = await rig.coordinator.model("solo")
        assert view.parked_tags == ["kv_cache", "weights"] and view.weights_version is None

    rig.run(story)
