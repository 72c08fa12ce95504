"""The five phases on one rank, without Ray: real ledger, host device, a toy engine with a real step thread."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ranks.bench import CAPACITY_BYTES, Bench, make_bench, sleep, wake
from ranks.toys import KV_BYTES, MIB, WEIGHTS_BYTES

from torpor.actors.messages import (
    DrainMode,
    FinishReason,
    GateReason,
    Kind,
    LedgerPhase,
    Phase,
    PhaseCall,
    RejectCode,
    RestoreMode,
)
from torpor.native import Device

ALL_BYTES = WEIGHTS_BYTES + KV_BYTES


async def test_a_sleep_frees_the_device_and_a_wake_takes_it_again(bench: Bench) -> None:
    """M1."""
    assert bench.free_bytes() == CAPACITY_BYTES - ALL_BYTES
    reply = await bench.whole(sleep(), "down")
    assert reply.freed_bytes == ALL_BYTES
    assert bench.free_bytes() == CAPACITY_BYTES
    status = await bench.status()
    assert (status.gate_open, status.gate_reason) == (False, GateReason.ASLEEP)
    assert status.parked_tags == ("kv_cache", "weights")
    assert (status.operation, status.ledger_phase) == ("down", LedgerPhase.IDLE)
    reply = await bench.whole(wake(), "up")
    assert reply.device_bytes == ALL_BYTES
    assert bench.free_bytes() == CAPACITY_BYTES - ALL_BYTES
    assert bench.engine.refreshed == 1
    request = bench.request(tokens=3)
    assert await bench.admit(request) == ["admitted"]
    assert "".join(event.text for event in await bench.read(request.id)) == "xxx"


async def test_a_wake_of_a_subset_leaves_the_gate_closed_until_nothing_is_parked(bench: Bench) -> None:
    """C3, F4."""
    await bench.whole(sleep(), "down")
    await bench.whole(wake("weights"), "half")
    steps = bench.engine.steps
    assert (await bench.status()).gate_reason is GateReason.ASLEEP
    assert bench.engine.resting and bench.engine.refreshed == 0
    assert await bench.admit(bench.request()) == ["closed"]
    await bench.whole(wake("kv_cache"), "rest")
    assert (await bench.status()).gate_open
    assert bench.engine.steps == steps


async def test_weights_that_woke_without_contents_keep_the_gate_closed(bench: Bench) -> None:
    """C9, F27."""
    await bench.whole(sleep(weights=RestoreMode.NONE), "down")
    await bench.whole(wake(), "up")
    status = await bench.status()
    assert status.parked_tags == ()
    assert status.undefined_tags == ("weights",)
    assert status.gate_reason is GateReason.CONTENTS_UNDEFINED
    assert await bench.admit(bench.request()) == ["closed"]
    assert bench.engine.resting
    await bench.whole(sleep(), "down again")
    await bench.whole(wake(), "up again")
    assert (await bench.status()).gate_reason is GateReason.CONTENTS_UNDEFINED, (
        "rubbish that was kept is rubbish"
    )


async def test_a_drain_lets_running_requests_finish_and_admits_no_other(bench: Bench) -> None:
    """F1."""
    request = bench.request(tokens=60)
    assert await bench.admit(request) == ["admitted"]
    assert (await bench.preflight(sleep())).ok
    draining = asyncio.create_task(bench.drain())
    await asyncio.sleep(0.02)
    assert not draining.done()
    assert await bench.admit(bench.request()) == ["closed"]
    assert (await draining).ok
    assert bench.engine.running() == 0
    events = await bench.read(request.id)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert "".join(event.text for event in events) == "x" * 60


async def test_an_aborting_drain_ends_requests_with_what_they_have(bench: Bench) -> None:
    """G2."""
    requests = [bench.request(tokens=100_000) for _ in range(3)]
    assert await bench.admit(*requests) == ["admitted"] * 3
    await asyncio.sleep(0.05)
    reply = await bench.drain(mode=DrainMode.ABORT)
    assert reply.ok
    assert reply.aborted_requests == 3
    events = await bench.read(requests[0].id)
    assert events[-1].finish_reason is FinishReason.ABORT
    assert events[-1].completion_tokens == len("".join(event.text for event in events)) > 0


async def test_an_idle_drain_is_refused_while_a_request_runs_and_harms_it_not(bench: Bench) -> None:
    """G2."""
    request = bench.request(tokens=100)
    await bench.admit(request)
    reply = await bench.drain(mode=DrainMode.IF_IDLE)
    assert [refusal.code for refusal in reply.refusals] == [RejectCode.NOT_IDLE]
    assert (await bench.status()).gate_open
    assert len("".join(event.text for event in await bench.read(request.id))) == 100
    assert (await bench.drain("again", mode=DrainMode.IF_IDLE)).ok
    assert await bench.admit(bench.request()) == ["closed"]


async def test_a_drain_out_of_time_reopens_the_gate_and_harms_no_request(bench: Bench) -> None:
    request = bench.request(tokens=150)
    await bench.admit(request)
    reply = await bench.drain(timeout_s=0.05)
    assert not reply.ok
    assert reply.refusals[0].code is RejectCode.DRAIN_TIMEOUT
    assert "1 requests" in reply.refusals[0].reason
    assert (await bench.status()).gate_open
    assert (await bench.read(request.id))[-1].finish_reason is FinishReason.LENGTH


async def test_an_abort_during_the_drain_ends_it_and_reopens(bench: Bench) -> None:
    await bench.admit(bench.request(tokens=100_000))
    draining = asyncio.create_task(bench.drain())
    await asyncio.sleep(0.02)
    assert (await bench.abort()).ok
    reply = await asyncio.wait_for(draining, 2)
    assert not reply.ok
    assert reply.refusals[0].code is RejectCode.CANCELLED
    assert (await bench.status()).gate_open


async def test_an_abort_after_the_stage_takes_everything_back(bench: Bench) -> None:
    await bench.until_staged(sleep())
    assert (await bench.status()).ledger_phase is LedgerPhase.STAGED
    assert bench.engine.resting
    assert (await bench.abort()).ok
    status = await bench.status()
    assert status.ledger_phase is LedgerPhase.IDLE
    assert status.gate_open
    assert bench.free_bytes() == CAPACITY_BYTES - ALL_BYTES
    request = bench.request()
    await bench.admit(request)
    assert (await bench.read(request.id))[-1].finish_reason is FinishReason.LENGTH
    late = await bench.stage()
    assert not late.ok, "a stage that arrives after the abort does nothing"
    assert (await bench.commit()).ok is False


async def test_a_wake_that_is_aborted_leaves_the_rank_asleep(bench: Bench) -> None:
    await bench.whole(sleep(), "down")
    await bench.until_staged(wake(), "up")
    assert bench.free_bytes() == CAPACITY_BYTES - ALL_BYTES
    assert (await bench.abort("up")).ok
    assert bench.free_bytes() == CAPACITY_BYTES
    assert (await bench.status()).gate_reason is GateReason.ASLEEP
    assert bench.engine.resting
    await bench.whole(wake(), "again")
    assert (await bench.status()).gate_open


async def test_a_stage_that_fails_leaves_everything_as_it_was(bench: Bench) -> None:
    """M3, F6."""
    assert (await bench.preflight(sleep())).ok
    assert (await bench.drain()).ok
    bench.device.fail_at(1)
    reply = await bench.stage()
    assert not reply.ok
    assert bench.free_bytes() == CAPACITY_BYTES - ALL_BYTES
    assert bench.engine.resting, "nobody steps without the others"
    status = await bench.status()
    assert status.gate_reason is GateReason.SLEEPING, "the other ranks may have staged"
    assert status.gate_operation == "op", "so that whoever comes after knows what to abort"
    assert (await bench.abort()).ok
    assert (await bench.status()).gate_operation is None
    assert (await bench.status()).gate_open
    assert not bench.engine.resting
    await bench.whole(sleep(), "retry")


async def test_an_abort_for_a_rank_that_is_lost_gives_the_memory_back_and_keeps_the_gate_closed(
    bench: Bench,
) -> None:
    """M3, G1: without the others nobody is served, so nobody may be let in."""
    seen: list[bool] = []
    release = bench.core._leader.gate.release  # type: ignore[union-attr]

    def watched(operation: str) -> None:
        release(operation)
        seen.append(bench.core._leader.gate.reason is GateReason.FAILED)  # type: ignore[union-attr]

    bench.core._leader.gate.release = watched  # type: ignore[union-attr, method-assign]
    await bench.until_staged(sleep())
    assert (await bench.abort(lost=True)).ok
    status = await bench.status()
    assert (status.ledger_phase, status.gate_open) == (LedgerPhase.IDLE, False)
    assert status.gate_reason is GateReason.FAILED and seen and all(seen)
    assert (await bench.abort()).ok
    assert (await bench.status()).gate_reason is GateReason.FAILED, "nothing opens it again"


async def test_a_wake_without_room_says_what_it_needs_and_stays_asleep(
    bench: Bench, device_name: str
) -> None:
    """M4, F5."""
    await bench.whole(sleep(), "down")
    other = Device.host(f"{device_name}-0", CAPACITY_BYTES)
    assert other.memory_info()[0] == CAPACITY_BYTES
    from torpor.native import Ledger

    thief = Ledger(other)
    taken = thief.create_region("workspace", 64 * MIB)
    for attempt in range(3):
        reply = await bench.preflight(wake(), f"up-{attempt}")
        assert not reply.ok
        refusal = reply.refusals[0]
        assert refusal.code is RejectCode.DEVICE_MEMORY
        assert (refusal.needed_bytes, refusal.free_bytes) == (ALL_BYTES, CAPACITY_BYTES - 64 * MIB)
        assert bench.free_bytes() == CAPACITY_BYTES - 64 * MIB
    del taken, thief
    await bench.whole(wake(), "up")


async def test_a_refresh_that_fails_fails_the_wake_and_leaves_it_asleep(bench: Bench) -> None:
    await bench.whole(sleep(), "down")
    bench.engine.refresh_error = "no tables"
    assert (await bench.preflight(wake(), "up")).ok
    reply = await bench.stage("up")
    assert not reply.ok
    assert "no tables" in reply.refusals[0].reason
    assert bench.free_bytes() == CAPACITY_BYTES
    assert (await bench.abort("up")).ok
    bench.engine.refresh_error = ""
    await bench.whole(wake(), "up again")


async def test_repeated_messages_get_the_first_answer_and_do_nothing(bench: Bench) -> None:
    first, second = await asyncio.gather(bench.preflight(sleep()), bench.preflight(sleep()))
    assert first.ok and replace(first, status=None) == replace(second, status=None)  # which is as of now
    assert (await bench.drain()).ok
    first, second = await asyncio.gather(bench.stage(), bench.stage())
    assert first == second and first.ok
    first, second = await asyncio.gather(bench.commit(), bench.commit())
    assert first == second
    assert first.freed_bytes == ALL_BYTES
    assert (await bench.publish()).ok and (await bench.publish()).ok
    assert (await bench.commit()).freed_bytes == ALL_BYTES
    refused = await bench.abort()
    assert not refused.ok, "what is committed only goes forward"
    assert bench.free_bytes() == CAPACITY_BYTES


async def test_a_lower_epoch_is_refused_and_a_higher_one_taken(bench: Bench) -> None:
    await bench.until_staged(sleep())
    bench.epoch = 5
    reply = await bench.commit()
    assert reply.ok and reply.epoch == 5, "a new coordinator drives on what the old one began"
    bench.epoch = 4
    stale = await bench.publish()
    assert not stale.ok
    assert "epoch 4" in stale.refusals[0].reason
    assert (await bench.status()).epoch == 5
    assert (await bench.status()).ledger_phase is LedgerPhase.COMMITTED


async def test_a_commit_that_fails_goes_on_when_asked_again(bench: Bench) -> None:
    await bench.until_staged(sleep())
    bench.device.fail_at(1, forever=True)
    reply = await bench.commit()
    assert not reply.ok
    assert reply.refusals[0].code is RejectCode.RANK_FAILED
    bench.device.fail_at(0)
    assert (await bench.commit()).ok
    assert bench.free_bytes() == CAPACITY_BYTES


async def test_a_commit_rides_over_one_failed_call(bench: Bench) -> None:
    await bench.until_staged(sleep())
    bench.device.fail_at(1)
    assert (await bench.commit()).ok
    assert bench.free_bytes() == CAPACITY_BYTES


async def test_a_rank_works_alone_on_one_operation_at_a_time(bench: Bench) -> None:
    await bench.until_staged(sleep(), "first")
    assert (await bench.preflight(sleep(), "second")).refusals[0].code is RejectCode.CONFLICT
    assert (await bench.drain("second")).refusals[0].code is RejectCode.CONFLICT
    assert not (await bench.stage("second")).ok
    assert (await bench.abort("second")).ok
    assert (await bench.status()).operation == "first"
    assert (await bench.commit("first")).ok


async def test_a_staged_operation_is_not_forgotten_over_many_others(bench: Bench) -> None:
    await bench.until_staged(sleep(), "staged")
    for number in range(40):
        assert not (await bench.preflight(sleep(), f"other-{number}")).ok
    assert (await bench.commit("staged")).ok
    assert (await bench.publish("staged")).ok


async def test_a_noop_changes_nothing_and_stops_nobody(bench: Bench) -> None:
    """C1: a wake of what is awake."""
    request = bench.request(tokens=100)
    await bench.admit(request)
    await bench.whole(wake(), "noop")
    assert (await bench.status()).gate_open
    assert (await bench.read(request.id))[-1].finish_reason is FinishReason.LENGTH


async def test_an_unknown_tag_is_refused_by_name(bench: Bench) -> None:
    reply = await bench.preflight(sleep("wieghts"))
    assert not reply.ok
    assert reply.refusals[0].code is RejectCode.UNKNOWN_TAG
    assert "wieghts" in reply.refusals[0].reason + reply.refusals[0].tag


async def test_a_slow_stage_is_stopped_by_an_abort(bench: Bench) -> None:
    assert (await bench.preflight(sleep())).ok
    assert (await bench.drain()).ok
    bench.device.delay("", 0.3)
    staging = asyncio.create_task(bench.stage(timeout_s=30))
    await asyncio.sleep(0.1)
    aborted = await asyncio.wait_for(bench.abort(), 10)
    assert aborted.ok
    assert not (await staging).ok
    bench.device.delay("", 0)
    assert bench.free_bytes() == CAPACITY_BYTES - ALL_BYTES
    assert (await bench.status()).gate_open


async def test_status_shows_a_stage_that_runs_and_then_its_digest(bench: Bench) -> None:
    """M6, M7: a coordinator that did not hear the answer must see what it would have told."""
    assert (await bench.preflight(sleep())).ok
    assert (await bench.drain()).ok
    bench.device.delay("", 0.1)
    staging = asyncio.create_task(bench.stage())
    await asyncio.sleep(0.05)
    status = await asyncio.wait_for(bench.status(), 2.0)
    assert (status.staging, status.staging_kind, status.staged_digest) == ("op", Kind.SLEEP, "")
    reply = await staging
    bench.device.delay("", 0)
    status = await bench.status()
    assert reply.ok and (status.staging, status.staged_digest) == (None, reply.digest)
    assert (await bench.abort()).ok
    assert (await bench.status()).staged_digest == ""


async def test_status_answers_while_a_commit_is_slow(bench: Bench) -> None:
    await bench.until_staged(sleep())
    bench.device.delay("unmap_range", 0.5)
    committing = asyncio.create_task(bench.commit())
    await asyncio.sleep(0.1)
    status = await asyncio.wait_for(bench.status(), 0.4)
    assert status.operation == "op"
    assert status.gate_reason is GateReason.SLEEPING
    bench.device.delay("unmap_range", 0)
    assert (await committing).ok


async def test_a_follower_has_no_gate_but_goes_through_all_phases(device_name: str) -> None:
    bench = await make_bench(device_name, rank=1)
    await bench.whole(sleep(), "down")
    status = await bench.status()
    assert (status.rank, status.gate_open, status.gate_reason) == (1, False, None)
    assert bench.engine.resting
    await bench.whole(wake(), "up")
    assert not bench.engine.resting
    await bench.core.close()


async def test_a_rank_that_is_not_loaded_refuses_and_says_why(device_name: str) -> None:
    from ranks.bench import spec

    from torpor.actors.rank.core import RankCore

    core = RankCore(spec(device_name))
    reply = await core.preflight(PhaseCall("op", Phase.PREFLIGHT, 1), sleep())
    assert reply.refusals[0].code is RejectCode.WRONG_STATE
    try:
        await core.load()
    except Exception as error:
        assert "engine.kind" in str(error)
    else:
        raise AssertionError("an engine of the kind 'toy' does not exist")
    status = await core.status()
    assert not status.loaded
    assert "engine.kind" in status.error
    assert status.gate_reason is GateReason.FAILED
    await core.close()
