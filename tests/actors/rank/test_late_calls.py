"""Calls of an operation that is over arrive late, while the next one is on its way."""

from __future__ import annotations

from ranks.bench import Bench, sleep

from torpor.actors.messages import GateReason, LedgerPhase


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
