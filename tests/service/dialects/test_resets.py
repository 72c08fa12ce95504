"""A reset forgets prefixes on every tier (F12), and a pause keeps a model's memory: over real ledgers and tiers."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.caching_toy import NEW, OLD
from service_native_rig import caching_model, native_rig

from torpor.actors.config import KvCacheConfig

FRESH = tuple(range(500, 512))


@pytest.mark.parametrize(("method", "path"), [("POST", "/reset_prefix_cache"), ("GET", "/flush_cache")])
async def test_no_tier_serves_an_old_block_after_a_reset(tmp_path: Path, method: str, path: str) -> None:
    """Prefixes on the GPU, in host memory, and both again while the cache sleeps with its contents kept."""
    model = caching_model(kv_cache=KvCacheConfig(host_bytes=4 << 20))
    async with native_rig(tmp_path, model) as rig:
        toy = rig.engine
        toy.compute("fresh", FRESH).close()  # the GPU's pages are all in use: older ones go to the host tier
        assert toy.cache.stats()["host_pages"] > 0
        assert toy.found() == {"old": len(OLD) - 1, "new": len(NEW) - 1}
        assert (await rig.http.request(method, path)).status_code == 200
        assert toy.found() == {"old": 0, "new": 0}
        toy.compute("new", NEW[:12]).close()
        assert toy.found()["new"] == 12
        keep = {"restore": {"kv_cache": "cpu"}}
        assert (await rig.http.post("/sleep", json=keep)).status_code == 200
        assert (await rig.http.request(method, path)).status_code == 200
        assert (await rig.http.post("/wake", json={})).status_code == 200
        assert toy.found() == {"old": 0, "new": 0}


async def test_a_pause_frees_nothing_and_forgets_nothing(tmp_path: Path) -> None:
    async with native_rig(tmp_path, caching_model()) as rig:
        free_bytes, found, contents = rig.free_bytes(), rig.engine.found(), rig.engine.contents()
        assert (await rig.http.post("/pause")).status_code == 200
        assert (rig.free_bytes(), rig.engine.found()) == (free_bytes, found)
        assert (await rig.http.post("/resume")).status_code == 200
        assert rig.engine.contents() == contents
