"""Sleep and wake over real rank processes: memory really free, and all ranks or none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from ranks.torpors import CAPACITY_BYTES, MakeTorpor, read, request
from ranks.toys import KV_BYTES, MIB, WEIGHTS_BYTES

from torpor.actors.messages import (
    FinishReason,
    GateReason,
    Kind,
    ModelState,
    OperationRequest,
    OperationState,
    RankOutcome,
    RejectCode,
)
from torpor.actors.ports import ControlUnreachable, GateClosed, InvalidRequest
from torpor.actors.ray.ports import RayControl
from torpor.native import Device, Ledger

ALL_BYTES = WEIGHTS_BYTES + KV_BYTES


@pytest.mark.parametrize("ranks", [1, 3])
async def test_a_sleep_frees_every_ranks_device_as_another_process_sees_it(
    make_torpor: MakeTorpor, ranks: int
) -> None:
    """M1, F9: the answer comes when the memory is free; this process can take it at once."""
    torpor = await make_torpor(ranks=ranks).loaded()
    assert [torpor.free_bytes(rank) for rank in range(ranks)] == [CAPACITY_BYTES - ALL_BYTES] * ranks
    assert "".join(event.text for event in await read(torpor.cluster.inference, request(3))) == "xxx"
    operation = await torpor.sleep()
    assert operation.state is OperationState.SUCCEEDED
    assert [rank.freed_bytes for rank in operation.ranks] == [ALL_BYTES] * ranks
    for rank in range(ranks):
        ledger = Ledger(Device.host(torpor.device_name(rank), CAPACITY_BYTES))
        everything = ledger.create_region("workspace", CAPACITY_BYTES)
        del everything, ledger
    with pytest.raises(GateClosed) as closed:
        await read(torpor.cluster.inference, request())
    assert closed.value.reason == GateReason.ASLEEP
    operation = await torpor.wake()
    assert operation.state is OperationState.SUCCEEDED
    assert [torpor.free_bytes(rank) for rank in range(ranks)] == [CAPACITY_BYTES - ALL_BYTES] * ranks
    assert "".join(event.text for event in await read(torpor.cluster.inference, request(3))) == "xxx"


async def test_requests_that_run_when_a_sleep_comes_end_whole(make_torpor: MakeTorpor) -> None:
    """F1, F2."""
    torpor = await make_torpor().loaded()
    streams = [asyncio.create_task(read(torpor.cluster.inference, request(200))) for _ in range(32)]
    await asyncio.sleep(0.2)
    operation = await torpor.sleep()
    assert operation.state is OperationState.SUCCEEDED
    for events in await asyncio.wait_for(asyncio.gather(*streams), 5):
        assert events[-1].finish_reason is FinishReason.LENGTH
        assert sum(len(event.text) for event in events) == 200


async def test_one_rank_without_room_refuses_in_preflight_and_nothing_changes(
    make_torpor: MakeTorpor,
) -> None:
    """M4, F8, C6: rank 1 of 3 cannot have its memory back; no rank wakes."""
    torpor = await make_torpor(ranks=3).loaded()
    await torpor.sleep()
    thief = Ledger(Device.host(torpor.device_name(1), CAPACITY_BYTES))
    stolen = thief.create_region("workspace", 100 * MIB)
    operation = await torpor.wake()
    assert operation.state is OperationState.REJECTED
    assert operation.code is RejectCode.DEVICE_MEMORY
    assert (operation.needed_bytes, operation.free_bytes) == (ALL_BYTES, 28 * MIB)
    assert [torpor.free_bytes(rank) for rank in (0, 2)] == [CAPACITY_BYTES] * 2
    assert (await torpor.view()).state is ModelState.ASLEEP
    del stolen, thief
    assert (await torpor.wake()).state is OperationState.SUCCEEDED
    assert "".join(event.text for event in await read(torpor.cluster.inference, request(3))) == "xxx"


async def test_one_rank_that_fails_in_stage_leaves_all_as_they_were_and_the_gate_open(
    make_torpor: MakeTorpor,
) -> None:
    """M3, F8, C6: rank 2's device fails its next call; a retry works."""
    torpor = await make_torpor(ranks=3, faults={2: {"fail_at": 1}}).loaded()
    operation = await torpor.sleep()
    assert operation.state is OperationState.REJECTED, operation
    assert operation.ranks[2].outcome is RankOutcome.FAILED
    assert "map" in (operation.ranks[2].reason or "") or "injected" in (operation.ranks[2].reason or "")
    assert [rank.freed_bytes for rank in operation.ranks] == [0, 0, 0]
    assert [torpor.free_bytes(rank) for rank in range(3)] == [CAPACITY_BYTES - ALL_BYTES] * 3
    view = await torpor.view()
    assert (view.state, view.gate_open) == (ModelState.AWAKE, True)
    assert "".join(event.text for event in await read(torpor.cluster.inference, request(3))) == "xxx"
    assert (await torpor.sleep()).state is OperationState.SUCCEEDED
    assert [torpor.free_bytes(rank) for rank in range(3)] == [CAPACITY_BYTES] * 3


async def test_a_request_that_the_engine_cannot_serve_is_refused_and_an_unknown_model_has_no_leader(
    make_torpor: MakeTorpor,
) -> None:
    torpor = await make_torpor().loaded()
    with pytest.raises(InvalidRequest, match="send another"):
        await read(torpor.cluster.inference, request(prompt="invalid"))
    with pytest.raises(KeyError):
        await read(torpor.cluster.inference, request(), model="nobody")
    refused = await torpor.control.submit(OperationRequest(Kind.SLEEP, "nobody"))
    assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.UNKNOWN_MODEL)
    with pytest.raises(KeyError):
        await torpor.control.operation("op-nothing")


async def test_a_client_that_goes_away_frees_its_place(make_torpor: MakeTorpor) -> None:
    """G4."""
    torpor = await make_torpor().loaded()
    events = torpor.cluster.inference.generate("toy", request(1_000_000))
    await anext(events)
    assert (await torpor.view()).ranks[0].live_sequences == 1
    await events.aclose()
    await torpor.until(lambda view: view.ranks[0].live_sequences == 0, 5)
    assert (await torpor.sleep()).state is OperationState.SUCCEEDED


async def test_a_model_that_cannot_load_is_failed_and_says_why(make_torpor: MakeTorpor) -> None:
    torpor = make_torpor(kind="cuda")
    view = await torpor.until(lambda view: view.state is ModelState.FAILED, 30)
    assert "cuda" in view.error or "GPU" in view.error
    assert "host" in view.error, "what to do instead"
    with pytest.raises(GateClosed) as closed:
        await read(torpor.cluster.inference, request())
    assert closed.value.reason == GateReason.FAILED


async def test_a_coordinator_that_cannot_open_its_journal_says_so_at_every_call(
    make_torpor: MakeTorpor, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    torpor = make_torpor(journal_path=str(tmp_path / "file" / "journal.db"))
    with pytest.raises(ControlUnreachable, match="journal"):
        await torpor.control.models()


async def test_without_a_coordinator_the_way_to_start_one_is_told(local_ray: None) -> None:
    with pytest.raises(ControlUnreachable, match="torpor serve"):
        await RayControl("nobody-here").models()
