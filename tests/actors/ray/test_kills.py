"""The table of kills, each with real processes; results are kept in bench/results/kills.json (F25, M6)."""

from __future__ import annotations

import asyncio
import time

import pytest
from ranks.kills import DRAINED_TOKENS, TABLE, Kill, Scene, When, Who, coordinator_pid, pids
from ranks.streams import streams_of
from ranks.torpors import CAPACITY_BYTES, MakeTorpor, Torpor, read, request, until
from ranks.toys import KV_BYTES, WEIGHTS_BYTES
from support.kept_rows import keep_row

from torpor.actors.config import RecoverPolicy
from torpor.actors.messages import FinishReason, GateReason, ModelState, ModelView, OperationState
from torpor.actors.ports import GateClosed

ALL_BYTES = WEIGHTS_BYTES + KV_BYTES
NOTES = (
    "One row a kill: who, during what, when; the operation's outcome and the model's state that were reached, and the "
    "seconds from the SIGKILL on, with their bounds. Host devices, real Ray (tests/actors/ray/test_kills.py, "
    "tests/actors/ray/test_front_ends_come_and_go.py, tests/e2e/test_head_dies.py)."
)


@pytest.mark.long
@pytest.mark.parametrize("kill", TABLE, ids=str)
async def test_a_kill_ends_in_the_state_that_the_contract_names_within_its_bound(
    make_torpor: MakeTorpor, kill: Kill
) -> None:
    """F25, M6, C6. A model beside it keeps its processes and its streams."""
    torpor = make_torpor(
        ranks=2,
        models=("toy", "other"),
        faults=Scene.faults(kill),
        engine=Scene.engine(kill),
        recover=RecoverPolicy.AUTO,
    )
    await torpor.loaded()
    scene = Scene(torpor, kill)
    async with streams_of(torpor.new_front_end(), "other", 8) as others:
        operation = await scene.begin()
        before = await pids_but_of_the_stopped(torpor, kill)
        coordinator = None if kill.who is Who.COORDINATOR else await coordinator_pid(torpor)
        await scene.strike()
        began_s = time.monotonic()
        await others.go_on()
        finished = await torpor.control.wait(operation.id, kill.operation_s)
        operation_s = time.monotonic() - began_s
        assert finished.state is kill.outcome, finished
        assert operation_s < kill.operation_s
        state_s = await settled(torpor, kill, before, began_s)
        await others.go_on()
        await assert_processes(torpor, kill, before, coordinator)
    await assert_whole(torpor, scene)
    row = {"who": str(kill.who), "during": str(kill.kind), "when": str(kill.when)}
    row |= {"outcome": str(finished.state), "state": str(kill.state)}
    seconds = {"operation_s": round(operation_s, 2), "state_s": round(state_s, 2)}
    bounds = {"operation_bound_s": kill.operation_s, "state_bound_s": kill.state_s}
    keep_row("kills", ("who", "during", "when"), row | seconds | bounds, NOTES)


async def pids_but_of_the_stopped(torpor: Torpor, kill: Kill) -> dict[str, list[int]]:
    """By model. Where something stands still, the coordinator cannot tell: the ranks that can are asked."""
    if kill.when not in (When.PREFLIGHT, When.PUBLISH):
        return {model: await pids(torpor, model) for model in ("toy", "other")}
    ranks = (0,) if kill.when is When.PREFLIGHT else (0, 1)
    return {
        model: [(await torpor.rank(model, rank).status.remote()).pid for rank in ranks]
        for model in ("toy", "other")
    }


async def settled(torpor: Torpor, kill: Kill, before: dict[str, list[int]], began_s: float) -> float:
    """Seconds until the model is where it must come to, by ranks that are there."""

    def there(view: ModelView) -> bool:
        ranks = {status.pid for status in view.ranks}
        new = kill.who is Who.COORDINATOR or not ranks & {*before["toy"]}
        awake = kill.state is ModelState.AWAKE
        return view.state is kill.state and len(ranks) == 2 and new and view.gate_open is awake

    await until(torpor.view, there, kill.state_s)
    return time.monotonic() - began_s


async def assert_processes(
    torpor: Torpor, kill: Kill, before: dict[str, list[int]], coordinator: int | None
) -> None:
    after = {model: await pids(torpor, model) for model in ("toy", "other")}
    assert after["other"][: len(before["other"])] == before["other"]
    if kill.who is Who.COORDINATOR:
        assert after["toy"][: len(before["toy"])] == before["toy"], "no rank was replaced"
    else:
        assert not {*after["toy"]} & {*before["toy"]}, "all of them were"
        assert await coordinator_pid(torpor) == coordinator


async def assert_whole(torpor: Torpor, scene: Scene) -> None:
    """Memory as the state says, nothing said in vain, and the model goes to sleep, wakes and serves."""
    kill = scene.kill
    if scene.drained is not None:
        events = await asyncio.wait_for(scene.drained, 20)
        if kill.who is Who.LEADER or kill.who is Who.FOLLOWER:
            assert events[-1].finish_reason is FinishReason.ERROR and events[-1].error
        else:
            assert sum(len(event.text) for event in events) == DRAINED_TOKENS
    awake = kill.state is ModelState.AWAKE
    free = CAPACITY_BYTES - ALL_BYTES * (2 if awake else 1)
    assert [torpor.free_bytes(rank) for rank in range(2)] == [free] * 2
    if not awake:
        assert (await torpor.view()).hold
        with pytest.raises(GateClosed) as closed:
            await read(torpor.cluster.inference, request())
        assert closed.value.reason == GateReason.ASLEEP
        woken = await torpor.wake()
        assert woken.state is OperationState.SUCCEEDED, woken
    assert "".join(event.text for event in await read(torpor.cluster.inference, request(3))) == "xxx"
    slept = await torpor.sleep()
    assert slept.state is OperationState.SUCCEEDED, slept
    assert [torpor.free_bytes(rank) for rank in range(2)] == [CAPACITY_BYTES - ALL_BYTES] * 2
