"""Real processes are really killed: a leader before and after first tokens, a client that holds (G3, G6)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace

import pytest
from ranks.front_doors import patient, served
from ranks.torpors import CAPACITY_BYTES, MakeTorpor, is_in, read, request
from ranks.toys import KV_BYTES, WEIGHTS_BYTES

from torpor.actors.config import ClusterConfig, RecoverPolicy
from torpor.actors.messages import FinishReason, ModelState, TokenEvent
from torpor.actors.ports import GateClosed

ALL_BYTES = WEIGHTS_BYTES + KV_BYTES


async def test_a_killed_leader_costs_no_request_that_had_not_begun(make_torpor: MakeTorpor) -> None:
    """G3: those wait for the model to recover, and are served then; the one that had begun ends with an error."""
    torpor = await make_torpor(recover=RecoverPolicy.AUTO).loaded()
    front_end = patient(torpor)
    events: list[TokenEvent] = []
    told = asyncio.Event()

    async def follow() -> None:
        async for event in front_end.generate("toy", request(1_000_000)):
            events.append(event)
            told.set()

    begun = asyncio.create_task(follow())
    # The rank runs it before the front end has its first token, and until then it would be submitted again.
    await asyncio.wait_for(told.wait(), 10)
    unstarted = [asyncio.create_task(read(front_end, request(3, "think"))) for _ in range(4)]
    view = await torpor.until(lambda view: view.ranks[0].live_sequences == 5, 5)
    os.kill(view.ranks[0].pid, signal.SIGKILL)
    await asyncio.wait_for(begun, 20)
    assert events[-1].finish_reason is FinishReason.ERROR and events[-1].error
    for answer in await asyncio.gather(*unstarted):
        assert "".join(event.text for event in answer) == "xxx"
        assert answer[-1].finish_reason is FinishReason.LENGTH
    after = await torpor.until(is_in(ModelState.AWAKE))
    assert after.ranks[0].pid != view.ranks[0].pid, "another process has served them"
    await torpor.until(lambda view: view.ranks[0].live_sequences == 0, 5)
    await front_end.close()


HOLDER = """
import sys, time
from torpor.service import Client
with Client(sys.argv[1]).asleep("toy", lease_s=2, on_expiry=sys.argv[2]) as freed:
    print(sum(freed.bytes.values()), flush=True)
    time.sleep(100)
"""


async def test_a_killed_holder_leaves_its_model_asleep_or_wakes_it_as_was_asked_for(
    make_torpor: MakeTorpor,
) -> None:
    """G6, with the device's own numbers: the memory is free while it holds, and taken again after the wake."""
    torpor = await make_torpor().loaded()
    front_end = patient(torpor)
    async with served(torpor) as url:
        for on_expiry in ("keep", "wake"):
            holder = await asyncio.create_subprocess_exec(
                sys.executable, "-c", HOLDER, url, on_expiry, stdout=asyncio.subprocess.PIPE
            )
            assert holder.stdout is not None
            line = await asyncio.wait_for(holder.stdout.readline(), 30)
            assert int(line) == ALL_BYTES
            assert torpor.free_bytes(0) == CAPACITY_BYTES
            with pytest.raises(GateClosed, match="held asleep by"):
                await read(front_end, request())
            holder.send_signal(signal.SIGKILL)
            await holder.wait()
            if on_expiry == "keep":
                kept = await torpor.until(lambda view: bool(view.holds) and view.holds[0].lease_s is None, 10)
                assert kept.state is ModelState.ASLEEP and torpor.free_bytes(0) == CAPACITY_BYTES
                assert (await torpor.wake()).reason is None
        await torpor.until(is_in(ModelState.AWAKE), 10)
        assert torpor.free_bytes(0) == CAPACITY_BYTES - ALL_BYTES
    await front_end.close()


async def test_a_model_that_nobody_asks_falls_asleep_and_the_next_request_wakes_it(
    make_torpor: MakeTorpor,
) -> None:
    """G6, F22, through the rank's own clock and gate; its memory is really free meanwhile."""

    def idle(config: ClusterConfig) -> ClusterConfig:
        return replace(config, models=(replace(config.models[0], sleep_after_idle_s=1.0),))

    torpor = await make_torpor(adapt=idle).loaded()
    front_end = patient(torpor)
    running = asyncio.create_task(read(front_end, request(1000)))
    await torpor.until(lambda view: view.ranks[0].live_sequences == 1, 5)
    assert len((await running)[-1].error) == 0
    await torpor.until(is_in(ModelState.ASLEEP), 10)
    assert torpor.free_bytes(0) == CAPACITY_BYTES
    answers = await asyncio.gather(*(read(front_end, request(3)) for _ in range(16)))
    assert ["".join(event.text for event in answer) for answer in answers] == ["xxx"] * 16
    operations = await torpor.control.operations("toy")
    assert [(one.kind, one.origin) for one in operations if one.kind == "wake"] == [("wake", "request")]
    await torpor.until(is_in(ModelState.ASLEEP), 10)
    await front_end.close()
