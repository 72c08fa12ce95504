"""A load that fails half way leaves nothing on the device, whoever still holds the rank."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from support.engine_host import KvCacheConfig, dummy_spec

from torpor.actors.config import MIB, DeviceConfig
from torpor.actors.rank.core import RankCore
from torpor.native import Device


async def test_weights_that_were_loaded_go_when_there_is_no_room_for_the_kv_cache(tiny: Path) -> None:
    """M3, M1: the rank lives on to say what was wrong, and its neighbours need the memory."""
    name = f"full-{uuid.uuid4().hex[:12]}"
    spec = dummy_spec(tiny, kv=KvCacheConfig(tokens_per_block=8, gpu_bytes=16 * MIB, host_bytes=2 * MIB))
    core = RankCore(replace(spec, device=DeviceConfig(kind="host", name=name, host_capacity_bytes=16 * MIB)))
    with pytest.raises(Exception, match="needed"):
        await core.load()
    free_bytes, total_bytes = Device.host(f"{name}-0", 16 * MIB).memory_info()
    assert free_bytes == total_bytes
    status = await core.status()
    assert not status.loaded and "needed" in status.error
    await core.close()
