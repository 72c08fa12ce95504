"""Wakes that read discarded weights again, over the ranks of a model: when, and what version is told (C9)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from coordinator_rig import CONFIG, WAKE, WEIGHTS_BYTES, Rig, asking

from torpor.actors.coordinator import Fault
from torpor.actors.messages import (
    GateReason,
    Kind,
    ModelState,
    OnDiscard,
    Operation,
    OperationState,
    RejectCode,
    RestoreMode,
)

DOWN = asking(Kind.SLEEP, restore={"weights": RestoreMode.NONE})
UPDATE = asking(Kind.UPDATE, tags=("weights",), weights_path="/weights/new")
STALE = asking(Kind.WAKE, accept_stale_weights=True)
WAITING = asking(Kind.WAKE, on_discard=OnDiscard.WAIT)


async def do(rig: Rig, *requests: object) -> Operation:
    """All of them; the last one's outcome."""
    for request in requests:
        done = await rig.do(request)  # type: ignore[arg-type]
        assert done.state is OperationState.SUCCEEDED, done
    return done


async def told(rig: Rig) -> tuple[ModelState, GateReason | None, int | None]:
    view = await rig.coordinator.model("chat")
    assert view.gate_open is rig.gate_open()
    return view.state, view.gate_reason, view.weights_version


def test_discarded_weights_are_read_again_on_all_ranks_and_counted(rig: Rig) -> None:
    """C9, C8."""

    async def story() -> None:
        await do(rig, DOWN)
        assert await told(rig) == (ModelState.ASLEEP, GateReason.ASLEEP, None), "no bytes, no version"
        planned = await do(rig, replace(WAKE, dry_run=True))
        assert planned.reloaded_bytes == 3 * WEIGHTS_BYTES
        assert (await told(rig))[0] is ModelState.ASLEEP
        done = await do(rig, WAKE)
        assert done.reloaded_bytes == 3 * WEIGHTS_BYTES
        assert await told(rig) == (ModelState.AWAKE, None, 0)
        assert (await do(rig, asking(Kind.SLEEP), WAKE)).reloaded_bytes == 0

    rig.run(story)


def test_a_pushed_version_is_never_replaced_unless_stale_weights_are_accepted(rig: Rig) -> None:
    """C9: woken undefined until the next update, or until somebody accepts what the source has."""

    async def story() -> None:
        await do(rig, UPDATE, DOWN, WAKE)
        assert await told(rig) == (ModelState.AWAKE, GateReason.CONTENTS_UNDEFINED, None)
        await do(rig, UPDATE)
        assert await told(rig) == (ModelState.AWAKE, None, 2)
        await do(rig, DOWN, WAKE)
        await rig.restart()
        assert await told(rig) == (ModelState.AWAKE, GateReason.CONTENTS_UNDEFINED, None)
        await do(rig, STALE)  # nothing is parked, and there is something to do
        assert await told(rig) == (ModelState.AWAKE, None, 0)
        assert [rank.ledger.written for rank in rig.chat] == [0] * 3
        await rig.restart()
        assert await told(rig) == (ModelState.AWAKE, None, 0)

    rig.run(story)


def test_who_waits_is_left_without_contents_as_asked_or_as_configured_when_it_runs(rig: Rig) -> None:
    """C9, F27; the policy changes in place."""

    async def story() -> None:
        await do(rig, DOWN, WAITING)
        assert (await told(rig))[1] is GateReason.CONTENTS_UNDEFINED
        await do(rig, WAKE)
        assert await told(rig) == (ModelState.AWAKE, None, 0)
        await rig.coordinator.adapt(replace(CONFIG.models[0], on_discard=OnDiscard.WAIT))
        await do(rig, DOWN, WAKE)
        assert (await told(rig))[1] is GateReason.CONTENTS_UNDEFINED
        assert (await do(rig, asking(Kind.WAKE, on_discard=OnDiscard.RELOAD))).reloaded_bytes
        assert rig.gate_open()

    rig.run(story)


@pytest.mark.parametrize("method", ["preflight", "stage"])
def test_one_rank_that_cannot_read_them_keeps_all_asleep_and_a_retry_works(rig: Rig, method: str) -> None:
    """M3, C6."""

    async def story() -> None:
        await do(rig, DOWN)
        free_bytes = rig.free_bytes()
        rig.chat[2].fault(method, Fault.REFUSE)
        done = await rig.do(WAKE)
        assert (done.state, done.reloaded_bytes) == (OperationState.REJECTED, 0)
        assert await told(rig) == (ModelState.ASLEEP, GateReason.ASLEEP, None)
        assert rig.free_bytes() == free_bytes
        rig.chat[1].fault("stage", Fault.OTHER_DIGEST)
        done = await rig.do(WAKE)
        assert done.code is RejectCode.DIGEST_MISMATCH, "they have read different files (M7)"
        await do(rig, WAKE)
        assert await told(rig) == (ModelState.AWAKE, None, 0)

    rig.run(story)


def test_the_deadline_of_the_stage_counts_the_bytes_that_are_read(rig: Rig) -> None:
    """C6."""

    async def story() -> None:
        limits: list[float] = []
        stage = rig.chat[0].stage

        async def watched(call: object, timeout_s: float) -> object:
            limits.append(timeout_s)
            return await stage(call, timeout_s)  # type: ignore[arg-type]

        rig.chat[0].stage = watched  # type: ignore[assignment, method-assign]
        await do(rig, DOWN, WAITING, DOWN, WAKE)
        _, waiting_s, _, reading_s = limits
        assert reading_s - waiting_s == pytest.approx(WEIGHTS_BYTES / 1e9)
        await asyncio.sleep(0)

    rig.run(story)
