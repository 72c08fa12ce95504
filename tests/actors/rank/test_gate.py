"""The gate alone: admission against drains, leases, and who may reopen it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from torpor.actors.messages import FinishReason, GateReason
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
        gate.begin_drain("op", only_if_idle=True)
    assert (gate.holder, gate.admit("b")) == (None, None)
    gate.leave("a", FinishReason.STOP)
    gate.leave("b", FinishReason.STOP)
    assert gate.begin_drain("op", only_if_idle=True).result(0) is Emptied.IDLE
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
                gate.begin_drain(f"op-{i}", only_if_idle=True)
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
