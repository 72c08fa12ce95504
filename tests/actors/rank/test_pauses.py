"""Pause, unpause and reset on one rank: they move no memory, and go through the same phases."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ranks.bench import CAPACITY_BYTES, Bench, sleep, wake
from ranks.toys import KV_BYTES, WEIGHTS_BYTES

from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    FinishReason,
    GateReason,
    Kind,
    LedgerPhase,
    OnDiscard,
    OperationRequest,
    RestoreMode,
)

UNPAUSE = OperationRequest(Kind.UNPAUSE, "toy", ())


def pause(mode: DrainMode = DrainMode.FINISH) -> OperationRequest:
    return OperationRequest(Kind.PAUSE, "toy", (), drain=DrainSpec(mode))


def reset(mode: DrainMode = DrainMode.IF_IDLE) -> OperationRequest:
    return OperationRequest(Kind.RESET, "toy", (), drain=DrainSpec(mode))


async def test_a_pause_closes_the_gate_and_touches_no_memory(bench: Bench) -> None:
    await bench.whole(pause(), "stop")
    status = await bench.status()
    assert (status.gate_open, status.gate_reason, status.paused) == (False, GateReason.PAUSED, True)
    assert (status.operation, status.kind, status.ledger_phase) == ("stop", Kind.PAUSE, LedgerPhase.IDLE)
    assert bench.free_bytes() == CAPACITY_BYTES - WEIGHTS_BYTES - KV_BYTES
    assert await bench.admit(bench.request()) == ["closed"]
    assert bench.engine.resting
    await bench.whole(UNPAUSE, "go")
    assert (await bench.status()).gate_open and not (await bench.status()).paused
    request = bench.request(tokens=3)
    assert await bench.admit(request) == ["admitted"]
    assert "".join(event.text for event in await bench.read(request.id)) == "xxx"


async def test_a_commit_says_whether_the_gate_stays_closed_and_plan_and_end_how_the_rank_is(
    bench: Bench,
) -> None:
    """C3: by this the coordinator knows whether other ranks must have published before the leader."""
    steps = (
        (pause(), True),
        (sleep(weights=RestoreMode.NONE), True),
        (wake("kv_cache"), True),
        (UNPAUSE, True),
        (wake(), True),  # undefined
        (sleep(), True),
        (OperationRequest(Kind.WAKE, "toy", on_discard=OnDiscard.RELOAD), False),
        (reset(), False),
    )
    for at, (request, closed) in enumerate(steps):
        name = f"op-{at}"
        planned = await bench.preflight(request, name)
        before = await bench.status()
        assert planned.status is not None and planned.status.parked_tags == before.parked_tags
        assert (planned.status.incarnation, planned.status.loaded) == (planned.incarnation, True)
        if request.kind not in (Kind.WAKE, Kind.UNPAUSE):
            assert (await bench.drain(name, request.drain.mode)).ok
        assert (await bench.stage(name)).ok
        assert (await bench.commit(name)).stays_closed is closed, name
        ended = await bench.publish(name)
        after = await bench.status()
        assert ended.status is not None and ended.status.gate_open is after.gate_open is not closed
        assert (ended.status.operation, ended.status.ledger_phase) == (name, LedgerPhase.IDLE)
        assert ended.status.parked_tags == after.parked_tags


async def test_a_pause_outlasts_a_sleep_and_a_wake(bench: Bench) -> None:
    """C3: the gate opens only if nothing is parked, paused or undefined, in whichever order that ends."""
    await bench.whole(pause(), "stop")
    await bench.whole(sleep(), "down")
    assert (await bench.status()).gate_reason is GateReason.ASLEEP
    await bench.whole(wake(), "up")
    status = await bench.status()
    assert (status.gate_reason, status.paused) == (GateReason.PAUSED, True)
    assert bench.engine.resting
    await bench.whole(sleep(), "down again")
    await bench.whole(UNPAUSE, "go")
    assert (await bench.status()).gate_reason is GateReason.ASLEEP
    await bench.whole(wake(), "up again")
    assert (await bench.status()).gate_open


async def test_what_a_pause_keeps_stands_still_and_goes_on_after_it(bench: Bench) -> None:
    """G2: a freeze, without a sleep."""
    request = bench.request(tokens=60)
    assert await bench.admit(request) == ["admitted"]
    await bench.whole(pause(DrainMode.FREEZE), "stop")
    steps = bench.engine.steps
    assert (await bench.status()).frozen_requests == 1
    await asyncio.sleep(0.1)
    assert bench.engine.steps == steps
    await bench.whole(UNPAUSE, "go")
    assert "".join(event.text for event in await bench.read(request.id)) == "x" * 60


async def test_a_pause_that_aborts_ends_what_runs_and_what_an_earlier_one_has_kept(bench: Bench) -> None:
    kept = bench.request(tokens=100_000)
    await bench.admit(kept)
    await bench.whole(pause(DrainMode.FREEZE), "keep")
    await bench.whole(pause(DrainMode.ABORT), "abort")
    assert (await bench.read(kept.id))[-1].finish_reason is FinishReason.ABORT
    status = await bench.status()
    assert (status.live_sequences, status.gate_reason) == (0, GateReason.PAUSED)


async def test_a_pause_that_is_taken_back_leaves_everything_as_it_was(bench: Bench) -> None:
    """M3."""
    request = bench.request(tokens=40)
    await bench.admit(request)
    await bench.until_staged(pause(DrainMode.FREEZE))
    assert (await bench.abort()).ok
    status = await bench.status()
    assert (status.gate_open, status.paused, status.ledger_phase) == (True, False, LedgerPhase.IDLE)
    assert "".join(event.text for event in await bench.read(request.id)) == "x" * 40


async def test_a_reset_forgets_prefixes_at_rest_and_lets_go_on(bench: Bench) -> None:
    request = bench.request(tokens=100)
    await bench.admit(request)
    refused = await bench.preflight(reset(), "busy")
    assert refused.ok and not (await bench.drain("busy", DrainMode.IF_IDLE)).ok
    assert (await bench.status()).gate_open and bench.engine.forgotten == 0
    await bench.whole(reset(DrainMode.FREEZE), "now")
    assert bench.engine.forgotten == 1
    assert (await bench.status()).gate_open
    assert "".join(event.text for event in await bench.read(request.id)) == "x" * 100
    await bench.whole(sleep(), "down")
    await bench.whole(reset(), "asleep")
    assert bench.engine.forgotten == 2
    assert (await bench.status()).gate_reason is GateReason.ASLEEP


async def test_requests_are_aborted_by_id_or_all_and_the_gate_stays_open(bench: Bench) -> None:
    """G2: with the tokens so far. A name ends with a slash or where it ends."""
    names = ("a/1", "a/2", "ab/1", "other")
    for name in names:
        assert await bench.admit(replace(bench.request(tokens=100_000), id=name)) == ["admitted"]
    await asyncio.sleep(0.05)
    assert await bench.core.abort_requests("front", "a") == 2
    assert (await bench.read("a/1"))[-1].finish_reason is FinishReason.ABORT
    assert (await bench.status()).live_sequences == 2
    assert await bench.core.abort_requests("front", "nobody") == 0
    assert await bench.core.abort_requests("front", None) == 2
    assert (await bench.read("other"))[-1].finish_reason is FinishReason.ABORT
    status = await bench.status()
    assert (status.gate_open, status.live_sequences) == (True, 0)
    assert await bench.admit(bench.request()) == ["admitted"]
