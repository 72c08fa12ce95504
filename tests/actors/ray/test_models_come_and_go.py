"""Models recover, are deleted and made, with real processes that are really killed (M6, M1)."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from ranks.torpors import CAPACITY_BYTES, MakeTorpor, Torpor, is_in, read, request
from ranks.toys import KV_BYTES, WEIGHTS_BYTES

from torpor.actors.config import RecoverPolicy
from torpor.actors.messages import GateReason, Kind, ModelState, Operation, OperationRequest, OperationState
from torpor.actors.ports import GateClosed, ModelExists

ALL_BYTES = WEIGHTS_BYTES + KV_BYTES


async def pids(torpor: Torpor) -> list[int]:
    return [status.pid for status in (await torpor.view()).ranks]


def there(pids: list[int]) -> list[int]:
    """Of these processes, those that have memory; one that has ended may wait for its parent to take note."""
    return [pid for pid in pids if any("VmRSS" in line for line in status_of(pid))]


def status_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


async def do(torpor: Torpor, kind: Kind) -> Operation:
    operation = await torpor.control.submit(OperationRequest(kind, "toy"))
    return await torpor.control.wait(operation.id, 40)


async def say(torpor: Torpor) -> str:
    return "".join(event.text for event in await read(torpor.cluster.inference, request(3)))


async def test_a_killed_rank_is_replaced_by_itself_and_the_model_serves_again(
    make_torpor: MakeTorpor,
) -> None:
    """M6, F25: all ranks are new ones, and nothing of the old ones is left on the devices."""
    torpor = await make_torpor(ranks=2, recover=RecoverPolicy.AUTO).loaded()
    assert await say(torpor) == "xxx"
    before = await pids(torpor)
    os.kill(before[1], signal.SIGKILL)
    view = await torpor.until(
        lambda view: (
            view.state is ModelState.AWAKE and view.gate_open and not {r.pid for r in view.ranks} & {*before}
        ),
        40,
    )
    assert view.error == ""
    assert [torpor.free_bytes(rank) for rank in range(2)] == [CAPACITY_BYTES - ALL_BYTES] * 2
    assert not there(before)
    assert await say(torpor) == "xxx"


async def test_a_sleeping_model_recovers_asleep_and_can_be_deleted_and_made_again(
    make_torpor: MakeTorpor,
) -> None:
    """M1, M6: what other processes see of the devices is what counts."""
    torpor = await make_torpor(ranks=2).loaded()
    assert (await torpor.sleep()).state is OperationState.SUCCEEDED
    before = await pids(torpor)
    os.kill(before[0], signal.SIGKILL)
    await torpor.until(is_in(ModelState.FAILED))
    recovered = await do(torpor, Kind.RECOVER)
    assert recovered.state is OperationState.SUCCEEDED, recovered
    view = await torpor.view()
    assert (view.state, view.hold, view.parked_tags) == (ModelState.ASLEEP, True, ["kv_cache", "weights"])
    assert [torpor.free_bytes(rank) for rank in range(2)] == [CAPACITY_BYTES] * 2
    with pytest.raises(GateClosed) as closed:
        await say(torpor)
    assert closed.value.reason == GateReason.ASLEEP
    assert (await torpor.wake()).state is OperationState.SUCCEEDED
    assert await say(torpor) == "xxx"
    await deleted_and_made_again(torpor)


async def deleted_and_made_again(torpor: Torpor) -> None:
    before = await pids(torpor)
    long = asyncio.create_task(read(torpor.cluster.inference, request(1500)))
    await asyncio.sleep(0.3)
    deleted = await do(torpor, Kind.DELETE)
    assert deleted.state is OperationState.SUCCEEDED, deleted
    assert sum(len(event.text) for event in await long) == 1500, "what ran has ended first"
    assert [record.freed_bytes for record in deleted.ranks] == [ALL_BYTES] * 2
    assert [torpor.free_bytes(rank) for rank in range(2)] == [CAPACITY_BYTES] * 2
    assert not there(before)
    with pytest.raises(KeyError):
        await say(torpor)
    (model,) = torpor.config.models
    assert (await torpor.control.create(model)).state is ModelState.LOADING
    await torpor.loaded()
    assert await say(torpor) == "xxx"
    with pytest.raises(ModelExists):
        await torpor.control.create(replace(model, tensor_parallel=1))
