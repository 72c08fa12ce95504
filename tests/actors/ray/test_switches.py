"""Two models on one named host device that cannot hold both: hundreds of switches under load (F23, M1, G3, G6)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from ranks.switches import WAKE, Switches
from ranks.torpors import CAPACITY_BYTES, MIB, MakeTorpor
from support.engine_host import write_config
from support.kept_rows import keep_row

from torpor.actors.config import ClusterConfig, EngineConfig, KvCacheConfig

CACHE = KvCacheConfig(tokens_per_block=8, gpu_bytes=80 * MIB, host_bytes=16 * MIB)


async def switch(make_torpor: MakeTorpor, folder: Path, clients: int, switches: int) -> dict[str, object]:
    """Half of the switches each way; the device has as much free at the end as at the beginning."""
    engine = EngineConfig(model=str(write_config(folder)), load_format="dummy", dtype="float32")

    def sharing(config: ClusterConfig) -> ClusterConfig:
        return replace(config, models=(replace(config.models[0], gpus_per_rank=0.0, gate=WAKE),))

    torpor = make_torpor(models=("first",), engine=engine, kv_cache=CACHE, adapt=sharing)
    (first,) = torpor.config.models
    second = replace(first, name="second", engine=replace(engine, seed=1))
    two = Switches(torpor.cluster, torpor.config, second)
    await two.begin()
    before = torpor.free_bytes(0)
    assert before < CAPACITY_BYTES - CACHE.gpu_bytes
    row: dict[str, object] = {"clients": clients, "switches": switches}
    row["wake_on_request_s"] = round(await two.on_request(clients, switches - switches // 2), 1)
    row["by_hand_s"] = round(await two.by_hand(clients, switches // 2), 1)
    assert torpor.free_bytes(0) == before, "one is awake, the other has left nothing behind"
    assert all(two.expected["first", n] != two.expected["second", n] for n in range(3)), "they are two models"
    await torpor.cluster.inference.close()  # type: ignore[attr-defined]
    return row | {"answers": dict(two.answers)}


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_two_models_switch_200_times_for_64_clients_and_lose_no_request(
    make_torpor: MakeTorpor, tmp_path: Path
) -> None:
    row = await switch(make_torpor, tmp_path, 64, int(os.environ.get("TORPOR_SWITCHES", "200")))
    notes = (
        "Two models on one device that cannot hold both, each answer compared with one from before any sleep."
    )
    keep_row("switches", ("device",), {"device": "host"} | row, notes)
