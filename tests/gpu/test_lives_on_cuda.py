"""Recovery and deletion on a GPU with real processes, seen through the driver; on a host device by `long`."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from gpu.protocol_rig import MIB, PROMPTS, cache, pool_bytes, slack_bytes
from support.engine_host import write_config

from torpor.actors.cluster import Cluster, start_local
from torpor.actors.config import ClusterConfig, DeviceConfig, EngineConfig, ModelConfig
from torpor.actors.messages import (
    GenerateRequest,
    Kind,
    ModelState,
    ModelView,
    OperationRequest,
    OperationState,
    Sampling,
)
from torpor.native import Device

DELETE = OperationRequest(Kind.DELETE, "tiny")


async def until(cluster: Cluster, state: ModelState, after: int = -1) -> ModelView:
    """The model's view once it is in this state, with a rank of another process than `after`."""
    async with asyncio.timeout(300):
        while True:
            view = await cluster.control.model("tiny")
            if view.state is state and view.gate_open and view.ranks[0].pid != after:
                return view
            await asyncio.sleep(0.2)


async def tokens_of(cluster: Cluster, name: str) -> list[int]:
    sampling = Sampling(max_tokens=16, temperature=0.0)
    wanted = GenerateRequest(name, token_ids=tuple(PROMPTS[9]), sampling=sampling)
    events = [event async for event in cluster.inference.generate("tiny", wanted)]
    return [token for event in events for token in event.token_ids]


async def live_and_die(cluster: Cluster, kind: str, device: Device, untouched: int) -> None:
    """A rank killed, the model recovered, then deleted."""
    await cluster.wait_until_loaded(300)
    view = await until(cluster, ModelState.AWAKE)
    said, awake = await tokens_of(cluster, "before"), device.memory_info()[0]
    assert untouched - awake >= pool_bytes(kind)
    os.kill(view.ranks[0].pid, signal.SIGKILL)
    await until(cluster, ModelState.AWAKE, after=view.ranks[0].pid)
    assert await tokens_of(cluster, "after") == said
    assert abs(device.memory_info()[0] - awake) <= slack_bytes(kind), "what the dead one had is back"
    done = await cluster.control.wait((await cluster.control.submit(DELETE)).id, 120)
    assert done.state is OperationState.SUCCEEDED, done
    assert abs(device.memory_info()[0] - untouched) <= slack_bytes(kind)
    assert await cluster.control.models() == []


@pytest.mark.parametrize(
    "kind",
    [pytest.param("host", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_a_killed_rank_s_memory_is_back_with_its_successor_and_a_deleted_model_s_for_all_m6_m1(
    tmp_path: Path, kind: str
) -> None:
    """With real processes; the kernel and the driver are asked from this one, which has none of that memory."""
    pytest.importorskip("ray")
    name = f"lives-{uuid.uuid4().hex[:8]}"
    config = DeviceConfig(kind=kind, name=name if kind == "host" else None, host_capacity_bytes=64 * MIB)
    device = Device.cuda(0) if kind == "cuda" else Device.host(f"{name}-0", 64 * MIB)
    untouched = device.memory_info()[0]
    engine = EngineConfig(model=str(write_config(tmp_path)), load_format="dummy", dtype="float32")
    model = ModelConfig("tiny", engine, kv_cache=cache(kind), gpus_per_rank=1.0 if kind == "cuda" else 0.0)
    wanted = ClusterConfig((model,), config, journal_path=str(tmp_path / "journal.db"))
    cluster = start_local(replace(wanted, namespace=f"torpor-{name}"))

    async def story() -> None:
        await live_and_die(cluster, kind, device, untouched)
        await cluster.inference.close()  # type: ignore[attr-defined]

    try:
        asyncio.run(story())
    finally:
        cluster.shutdown()
