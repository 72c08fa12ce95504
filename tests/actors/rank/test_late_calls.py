"""Calls of an operation that is over arrive late, while the next one is on its way."""

from __future__ import annotations

import asyncio

from ranks.bench import Bench, sleep

from torpor.actors.messages import DrainMode, GateReason, LedgerPhase


async def test_a_late_abort_leaves_the_engine_at_rest_under_another_operation_s_stage(bench: Bench) -> None:
    """M6: nothing may step over memory that is staged."""
    assert (await bench.preflight(sleep(), "first")).ok
    await bench.until_staged(sleep(), "second")
    assert bench.engine.resting
    assert (await bench.abort("first")).ok
    status = await bench.status()
    assert (status.ledger_phase, status.operation) == (LedgerPhase.STAGED, "second")
    assert bench.engine.resting and not status.gate_open
    assert (await bench.commit("second")).ok and (await bench.publish("second")).ok


async def test_a_late_abort_does_not_thaw_what_another_operation_froze(bench: Bench) -> None:
    """M6, G2: its stage failed here, but other ranks may have staged."""
    assert (await bench.preflight(sleep(), "first")).ok
    request = bench.request(tokens=400)
    await bench.admit(request)
    assert (await bench.preflight(sleep(), "second")).ok
    assert (await bench.drain("second", mode=DrainMode.FREEZE)).ok
    bench.device.fail_at(1)
    assert not (await bench.stage("second")).ok
    assert bench.engine.resting
    assert (await bench.abort("first")).ok
    status = await bench.status()
    assert bench.engine.resting and (status.gate_reason, status.frozen_requests) == (GateReason.SLEEPING, 1)
    assert (await bench.abort("second")).ok
    assert len("".join(event.text for event in await bench.read(request.id))) == 400


async def test_a_late_preflight_does_not_keep_the_engine_at_rest(bench: Bench) -> None:
    """G2: of an operation that was given up without this rank's hearing of it."""
    request = bench.request(tokens=400)
    await bench.admit(request)
    assert (await bench.preflight(sleep(), "second")).ok
    assert (await bench.drain("second", mode=DrainMode.FREEZE)).ok
    assert (await bench.preflight(sleep(), "first")).ok
    bench.device.fail_at(1)
    assert not (await bench.stage("second")).ok
    assert (await bench.abort("second")).ok
    assert not bench.engine.resting
    assert len("".join(event.text for event in await bench.read(request.id))) == 400


async def test_status_that_brings_a_new_epoch_ends_the_old_coordinator_s_calls(bench: Bench) -> None:
    """M6: also of those that wait for their turn behind a stage."""
    assert (await bench.preflight(sleep(), "op")).ok and (await bench.drain("op")).ok
    bench.device.delay("", 0.05)
    staging = asyncio.create_task(bench.stage("op"))
    await asyncio.sleep(0.02)
    waiting = asyncio.create_task(bench.preflight(sleep(), "next"))
    await asyncio.sleep(0.02)
    status = await bench.status(epoch=9)
    assert (status.epoch, status.staging) == (9, "op")
    assert (await staging).ok
    bench.device.delay("", 0)
    for reply in (await waiting, await bench.commit("op"), await bench.abort("op")):
        assert not reply.ok and "is over" in reply.refusals[0].reason
    assert (await bench.status(epoch=3)).epoch == 9, "it never falls"
    bench.epoch = 9
    assert (await bench.commit("op")).ok and (await bench.publish("op")).ok


async def test_a_late_drain_does_not_overtake_the_operation_that_came_after_it(bench: Bench) -> None:
    """G1: its lease would reopen the gate while the others stage."""
    assert (await bench.preflight(sleep(), "first")).ok
    assert (await bench.preflight(sleep(), "second")).ok
    assert (await bench.drain("second")).ok
    late = await bench.drain("first", lease_s=0.0)
    assert not late.ok and "another operation began" in late.refusals[0].reason
    assert (await bench.status()).gate_reason is GateReason.DRAINING
    assert (await bench.stage("second")).ok, "its gate is still its own"
    assert (await bench.commit("second")).ok and (await bench.publish("second")).ok
