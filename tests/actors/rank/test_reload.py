"""The phases of a wake that reads the weights again: what fails, is stopped or refused leaves the rank asleep (C9)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from ranks.bench import CAPACITY_BYTES, Bench, sleep, wake
from ranks.toys import WEIGHTS_BYTES

from torpor.actors.messages import (
    GateReason,
    LedgerPhase,
    OnDiscard,
    OperationRequest,
    RejectCode,
    RestoreMode,
)

NONE = sleep(weights=RestoreMode.NONE)


def reload(*tags: str, stale: bool = False) -> OperationRequest:
    return replace(wake(*tags), on_discard=OnDiscard.RELOAD, accept_stale_weights=stale)


async def assert_asleep(bench: Bench) -> None:
    status = await bench.status()
    assert (status.gate_reason, status.ledger_phase) == (GateReason.ASLEEP, LedgerPhase.IDLE)
    assert status.parked_tags == ("kv_cache", "weights")
    assert bench.free_bytes() == CAPACITY_BYTES
    assert bench.engine.resting


async def test_a_wake_that_reads_the_weights_again_opens_the_gate(bench: Bench) -> None:
    """C9: the same weights, so that nothing that they have computed is forgotten."""
    await bench.whole(NONE, "down")
    planned = await bench.preflight(reload(), "look")
    assert (planned.reload_bytes, bench.engine.reloaded) == (WEIGHTS_BYTES, 0)
    await bench.whole(reload(), "up")
    status = await bench.status()
    assert (status.gate_open, status.undefined_tags, status.weights_version) == (True, (), 0)
    assert (bench.engine.reloaded, bench.engine.refreshed, bench.engine.changes) == (1, 1, [False])
    await bench.whole(reload(), "again")
    await bench.whole(sleep(), "kept")
    await bench.whole(reload(), "with contents")
    assert bench.engine.reloaded == 1, "what has its contents is not read again"


@pytest.mark.parametrize("piece", [0, 1, 2])
async def test_a_reload_that_fails_at_any_piece_leaves_the_rank_asleep_and_a_retry_works(
    bench: Bench, piece: int
) -> None:
    """M3."""
    await bench.whole(NONE, "down")
    bench.engine.fails_at = piece
    assert (await bench.preflight(reload(), "up")).ok
    reply = await bench.stage("up")
    assert not reply.ok and "disk has failed" in reply.refusals[0].reason
    assert bench.free_bytes() == CAPACITY_BYTES
    assert (await bench.status()).gate_reason is GateReason.WAKING, "other ranks may have staged"
    assert (await bench.abort("up")).ok
    await assert_asleep(bench)
    bench.engine.fails_at = -1
    await bench.whole(reload(), "retry")
    assert (await bench.status()).gate_open


async def test_any_device_call_of_such_a_wake_may_fail(bench: Bench) -> None:
    """M3: the k-th call, for each k."""
    await bench.whole(NONE, "down")
    for k in range(1, 50):
        name = f"up-{k}"
        assert (await bench.preflight(reload(), name)).ok
        bench.device.fail_at(k)
        reply = await bench.stage(name)
        bench.device.fail_at(0)
        assert (await bench.abort(name)).ok
        await assert_asleep(bench)
        if reply.ok:
            break
    assert reply.ok and k > 2
    await bench.whole(reload(), "retry")
    assert (await bench.status()).gate_open


async def test_an_abort_stops_a_reload_between_two_pieces(bench: Bench) -> None:
    """C6."""
    await bench.whole(NONE, "down")
    bench.engine.pieces, bench.engine.piece_s = 1000, 0.02
    assert (await bench.preflight(reload(), "up")).ok
    staging = asyncio.create_task(bench.stage("up", timeout_s=30))
    await asyncio.sleep(0.1)
    assert (await bench.status()).staging == "up"
    assert (await asyncio.wait_for(bench.abort("up"), 5)).ok
    assert [one.code for one in (await staging).refusals] == [RejectCode.CANCELLED]
    await assert_asleep(bench)
    assert (await bench.preflight(reload(), "late")).ok
    late = await bench.stage("late", timeout_s=1.0)
    assert [one.code for one in late.refusals] == [RejectCode.STAGE_TIMEOUT]
    assert (await bench.abort("late")).ok
    await assert_asleep(bench)


async def test_a_source_that_cannot_be_read_is_refused_before_anybody_notices(bench: Bench) -> None:
    await bench.whole(NONE, "down")
    bench.engine.source_error = "there is no model at /gone"
    reply = await bench.preflight(reload(), "up")
    assert [one.code for one in reply.refusals] == [RejectCode.WEIGHTS_REFUSED]
    assert "/gone" in reply.refusals[0].reason and "on_discard wait" in reply.refusals[0].reason
    bench.engine.source_error, bench.engine.source_changed = "", True
    reply = await bench.preflight(reload(), "changed")
    assert "has changed" in reply.refusals[0].reason
    await assert_asleep(bench)
    await bench.whole(reload(stale=True), "accepted")
    assert bench.engine.changes == [True], "they are others than those that were there"


async def test_undefined_weights_are_read_where_they_lie_and_an_abort_leaves_them_undefined(
    bench: Bench,
) -> None:
    """C9: after a wake that left them so; a wake of other tags alone is none of theirs."""
    await bench.whole(NONE, "down")
    await bench.whole(wake(), "up")
    await bench.whole(reload("kv_cache"), "not asked for")
    assert bench.engine.reloaded == 0
    await bench.until_staged(reload(), "taken back")
    assert (await bench.abort("taken back")).ok
    status = await bench.status()
    assert (status.gate_reason, status.undefined_tags) == (GateReason.CONTENTS_UNDEFINED, ("weights",))
    await bench.whole(reload(), "again")
    assert (await bench.status()).gate_open and bench.engine.changes == [False]
