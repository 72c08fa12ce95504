"""The gate alone: admission against drains, leases, and who may reopen it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from torpor.actors.messages import DrainMode, FinishReason, GateReason
from torpor.actors.rank.gate import Emptied, Gate, GateFull, GateHeld, NotDrained, NotIdle


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> Gate:
    gate = Gate(clock, capacity=1000)
    gate.open()
    return gate


def test_a_gate_is_closed_at_birth_and_says_that_it_is_loading(clock: Clock) -> None:
    gate = Gate(clock, capacity=1)
    assert gate.admit("a") is GateReason.LOADING
    assert gate.running == 0


def test_no_request_slips_in_after_a_drain_has_begun(gate: Gate) -> None:
    """G1: eight doors hammer the gate while it drains; what was let in is waited for, and nothing comes after."""
    admitted: list[str] = []
    late: list[str] = []
    refused: list[str] = []
    over, stop = threading.Event(), threading.Event()

    def door(name: int) -> None:
        for i in itertools.count():
            if stop.is_set():
                return
            was_over, request = over.is_set(), f"{name}-{i}"
            if gate.admit(request) is None:
                (late if was_over else admitted).append(request)
                time.sleep(0)  # someone else's turn, with this request inside
                gate.leave(request, FinishReason.STOP)
            else:
                refused.append(request)

    doors = [threading.Thread(target=door, args=(name,)) for name in range(8)]
    for thread in doors:
        thread.start()
    while len(admitted) < 50:
        time.sleep(0.0005)
    assert gate.begin_drain("op").result(10) is Emptied.IDLE
    over.set()
    running_when_over = gate.running
    time.sleep(0.05)
    stop.set()
    for thread in doors:
        thread.join()
    assert running_when_over == 0
    assert late == []
    assert refused, "nobody came after the drain: this shows nothing"


def test_a_drain_waits_for_the_last_request(gate: Gate) -> None:
    gate.admit("a")
    gate.admit("b")
    emptied = gate.begin_drain("op")
    gate.leave("a", FinishReason.STOP)
    assert not emptied.done()
    assert gate.admit("c") is GateReason.DRAINING
    gate.leave("b", FinishReason.ABORT)
    assert emptied.result(0) is Emptied.IDLE
    assert gate.drained("op", lease_s=5) == 1, "one was aborted"


def test_a_drain_that_wants_an_idle_gate_is_refused_with_one_inside_and_the_gate_stays_open(
    gate: Gate,
) -> None:
    """G2, G1: decided under the mutex of the admissions."""
    gate.admit("a")
    with pytest.raises(NotIdle, match="1 requests run or wait"):
        gate.begin_drain("op", DrainMode.IF_IDLE)
    assert (gate.holder, gate.admit("b")) == (None, None)
    gate.leave("a", FinishReason.STOP)
    gate.leave("b", FinishReason.STOP)
    assert gate.begin_drain("op", DrainMode.IF_IDLE).result(0) is Emptied.IDLE
    assert gate.admit("c") is GateReason.DRAINING


def test_between_an_idle_drain_and_a_door_one_of_both_wins(gate: Gate) -> None:
    """G1, G2: never is a request inside a gate that was closed as idle."""
    closed: list[int] = []  # who was inside, each time
    busy: list[int] = []
    stop = threading.Event()

    def drain() -> None:
        for i in itertools.count():
            if stop.is_set():
                return
            try:
                gate.begin_drain(f"op-{i}", DrainMode.IF_IDLE)
                closed.append(gate.running)
                gate.release(f"op-{i}")
            except NotIdle:
                busy.append(i)
            time.sleep(0)

    drainer = threading.Thread(target=drain)
    drainer.start()
    deadline = time.monotonic() + 10
    while (len(closed) < 50 or len(busy) < 50) and time.monotonic() < deadline:
        if gate.admit("a") is None:
            time.sleep(0)  # the drain's turn, with this request inside
            gate.leave("a", FinishReason.STOP)
        time.sleep(0)
    stop.set()
    drainer.join()
    assert len(closed) >= 50 and len(busy) >= 50, "one never won: this shows nothing"
    assert not any(closed)


def test_a_drain_reopens_by_itself_when_neither_stage_nor_release_comes(gate: Gate, clock: Clock) -> None:
    """M6: the coordinator died after the drain."""
    gate.begin_drain("op")
    gate.drained("op", lease_s=5)
    clock.now = 4.9
    gate.tick()
    assert gate.reason is GateReason.DRAINING
    clock.now = 5.0
    gate.tick()
    assert gate.admit("a") is None


def test_a_stage_after_the_lease_is_refused_since_requests_may_run(gate: Gate, clock: Clock) -> None:
    gate.begin_drain("op")
    gate.drained("op", lease_s=5)
    clock.now = 5.0
    gate.tick()
    with pytest.raises(NotDrained):
        gate.hold_for_stage("op", GateReason.SLEEPING)


def test_a_staged_gate_never_reopens_alone_but_says_in_doubt(gate: Gate, clock: Clock) -> None:
    gate.begin_drain("op")
    gate.drained("op", lease_s=5)
    gate.hold_for_stage("op", GateReason.SLEEPING)
    clock.now = 1000.0
    gate.tick()
    assert gate.reason is GateReason.SLEEPING, "no lease runs while a stage works"
    gate.staged("op", lease_s=5)
    clock.now = 1005.0
    gate.tick()
    assert gate.reason is GateReason.IN_DOUBT
    gate.release("op")
    assert gate.reason is None, "only the decision reopens it"


def test_a_staged_gate_is_not_overtaken_by_another_operation(gate: Gate) -> None:
    gate.begin_drain("op")
    gate.hold_for_stage("op", GateReason.SLEEPING)
    with pytest.raises(GateHeld):
        gate.begin_drain("other")
    gate.release("other")
    assert gate.reason is GateReason.SLEEPING


def test_releasing_ends_the_wait_and_puts_the_reason_back(gate: Gate) -> None:
    gate.settle("earlier", GateReason.ASLEEP)
    emptied = gate.begin_drain("op")
    assert gate.reason is GateReason.DRAINING
    gate.release("op")
    assert emptied.done()
    assert gate.reason is GateReason.ASLEEP


def test_an_overtaken_drain_is_told_so(gate: Gate) -> None:
    gate.admit("a")
    first = gate.begin_drain("first")
    gate.begin_drain("second")
    assert first.result(0) is Emptied.RELEASED
    gate.release("second")
    assert gate.reason is None


@pytest.mark.parametrize(
    "attempt",
    [
        lambda gate: gate.release("op"),
        lambda gate: gate.settle("op", None),
        lambda gate: gate.open(),
        lambda gate: gate.begin_drain("again"),
    ],
    ids=["release", "settle", "open", "drain"],
)
def test_a_failed_gate_stays_closed(gate: Gate, attempt: Callable[[Gate], object]) -> None:
    gate.admit("a")
    emptied = gate.begin_drain("op")
    gate.fail()
    assert emptied.result(0) is Emptied.FAILED
    attempt(gate)
    assert gate.admit("b") is GateReason.FAILED


def test_a_gate_holds_no_more_than_its_capacity(clock: Clock) -> None:
    gate = Gate(clock, capacity=1)
    gate.open()
    assert gate.admit("a") is None
    with pytest.raises(GateFull):
        gate.admit("b")
    gate.leave("a", FinishReason.STOP)
    assert gate.admit("b") is None


def frozen(gate: Gate, clock: Clock, freeze_timeout_s: float | None = None) -> None:
    """Asleep, with "a" and "b" frozen inside."""
    gate.admit("a")
    gate.admit("b")
    assert gate.begin_drain("freeze", DrainMode.FREEZE, freeze_timeout_s).result(0) is Emptied.IDLE
    gate.drained("freeze", lease_s=5)
    gate.hold_for_stage("freeze", GateReason.SLEEPING)
    gate.staged("freeze", lease_s=5)
    gate.settle("freeze", GateReason.ASLEEP)


def test_frozen_requests_keep_their_places_until_the_gate_opens(gate: Gate, clock: Clock) -> None:
    """G2: and count among those that it may hold."""
    frozen(gate, clock)
    assert (gate.running, gate.frozen) == (2, 2)
    assert gate.admit("c") is GateReason.ASLEEP
    gate.leave("a", FinishReason.ABORT)
    assert (gate.running, gate.frozen) == (1, 1)
    gate.hold_for_stage("wake", GateReason.WAKING)
    gate.settle("wake", None)
    assert (gate.running, gate.frozen) == (1, 0)
    with pytest.raises(NotIdle):
        gate.begin_drain("next", DrainMode.IF_IDLE)


def test_a_stage_over_requests_that_nobody_froze_is_refused(gate: Gate) -> None:
    gate.admit("a")
    gate.begin_drain("op")
    with pytest.raises(NotDrained):
        gate.hold_for_stage("op", GateReason.SLEEPING)


def test_a_freeze_that_is_taken_back_leaves_its_requests_running(gate: Gate) -> None:
    gate.admit("a")
    gate.begin_drain("op", DrainMode.FREEZE, 1.0)
    gate.hold_for_stage("op", GateReason.SLEEPING)
    assert gate.frozen == 1
    gate.release("op")
    assert (gate.reason, gate.running, gate.frozen) == (None, 1, 0)
    gate.begin_drain("other")
    with pytest.raises(NotDrained):
        gate.hold_for_stage("other", GateReason.SLEEPING)


def test_a_wake_that_is_taken_back_leaves_them_frozen(gate: Gate, clock: Clock) -> None:
    frozen(gate, clock)
    gate.hold_for_stage("wake", GateReason.WAKING)
    gate.release("wake")
    assert (gate.reason, gate.frozen) == (GateReason.ASLEEP, 2)


@pytest.mark.parametrize("mode", [DrainMode.FINISH, DrainMode.FREEZE])
def test_a_drain_waits_for_nobody_who_is_frozen_already(gate: Gate, clock: Clock, mode: DrainMode) -> None:
    frozen(gate, clock)
    assert gate.begin_drain("further", mode).result(0) is Emptied.IDLE
    gate.hold_for_stage("further", GateReason.SLEEPING)


def test_an_aborting_drain_waits_for_those_who_are_frozen(gate: Gate, clock: Clock) -> None:
    frozen(gate, clock)
    emptied = gate.begin_drain("further", DrainMode.ABORT)
    gate.leave("a", FinishReason.ABORT)
    assert not emptied.done()
    gate.leave("b", FinishReason.ABORT)
    assert emptied.result(0) is Emptied.IDLE
    assert gate.drained("further", lease_s=5) == 2


def test_a_drain_that_wants_an_idle_gate_finds_frozen_requests(gate: Gate, clock: Clock) -> None:
    frozen(gate, clock)
    with pytest.raises(NotIdle):
        gate.begin_drain("further", DrainMode.IF_IDLE)
    assert gate.reason is GateReason.ASLEEP


def test_a_freeze_is_over_after_its_time_and_says_so_once(gate: Gate, clock: Clock) -> None:
    frozen(gate, clock, freeze_timeout_s=10.0)
    clock.now = 9.9
    assert not gate.freeze_is_over()
    clock.now = 10.0
    assert gate.freeze_is_over()
    assert not gate.freeze_is_over()


def test_a_further_freeze_does_not_lengthen_the_first(gate: Gate, clock: Clock) -> None:
    frozen(gate, clock, freeze_timeout_s=10.0)
    gate.begin_drain("further", DrainMode.FREEZE)
    gate.hold_for_stage("further", GateReason.SLEEPING)
    gate.settle("further", GateReason.ASLEEP)
    clock.now = 10.0
    assert gate.freeze_is_over()


def test_a_freeze_without_a_limit_lasts(gate: Gate, clock: Clock) -> None:
    frozen(gate, clock)
    clock.now = 1e9
    assert not gate.freeze_is_over()
