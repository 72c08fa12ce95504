"""Two models on one GPU that cannot hold both: 50 switches under load (F23, M1). Needs Ray and transformers."""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")

from ranks.switches import WAKE, Switches
from support.engine_host import write_config
from support.kept_rows import keep_row

from torpor.actors.cluster import start_local
from torpor.actors.config import ClusterConfig, DeviceConfig, EngineConfig, KvCacheConfig, ModelConfig
from torpor.native import Device

MIB = 1 << 20
SHARE = 0.55  # of the device, for the KV cache of each
SLACK_BYTES = 64 * MIB  # what the driver may round


def run(folder: Path, device: Device, config: DeviceConfig, clients: int, switches: int) -> dict[str, object]:
    """Half of the switches each way; what is free at the end is what was free at the beginning."""
    gc.collect()  # what other tests of this process have left would be given back in the midst
    if config.kind == "cuda":
        torch.cuda.empty_cache()
    free, total = device.memory_info()
    assert free > 0.9 * total, "somebody else has this device's memory"
    cache = KvCacheConfig(
        tokens_per_block=256, gpu_bytes=int(SHARE * total) // (2 * MIB) * 2 * MIB, host_bytes=256 * MIB
    )
    engine = EngineConfig(model=str(write_config(folder)), load_format="dummy", dtype="float32")
    share = 0.5 if config.kind == "cuda" else 0.0
    first = ModelConfig("first", engine, kv_cache=cache, gate=WAKE, gpus_per_rank=share)
    wanted = ClusterConfig((first,), config, journal_path=str(folder / "journal.db"))
    cluster = start_local(wanted)
    try:
        two = Switches(cluster, wanted, replace(first, name="second", engine=replace(engine, seed=1)))
        return asyncio.run(switch(two, device, clients, switches))
    finally:
        cluster.shutdown()


async def switch(two: Switches, device: Device, clients: int, switches: int) -> dict[str, object]:
    await two.begin()
    before = device.memory_info()[0]
    row: dict[str, object] = {"clients": clients, "switches": switches}
    row["wake_on_request_s"] = round(await two.on_request(clients, switches - switches // 2), 1)
    row["by_hand_s"] = round(await two.by_hand(clients, switches // 2), 1)
    assert abs(device.memory_info()[0] - before) <= SLACK_BYTES, (
        "the one that sleeps has left something behind"
    )
    await two.cluster.inference.close()  # type: ignore[attr-defined]
    assert all(count > clients for count in two.answers.values())
    return row | {"answers": dict(two.answers)}


@pytest.mark.gpu
def test_two_models_on_one_gpu_switch_50_times_and_every_answer_is_right_f23_m1(tmp_path: Path) -> None:
    switches = int(os.environ.get("TORPOR_SWITCHES", "50"))
    row = run(tmp_path, Device.cuda(0), DeviceConfig(kind="cuda"), 64, switches)
    keep_row("switches", ("device",), {"device": "cuda"} | row)
