"""Restore mode disk for all tags, verified wakes, and what a disk refuses, over HTTP and real ledgers."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

from ranks.caching_toy import BLOCK, NEW, OLD, PAGE_BYTES, WEIGHTS_BYTES
from service_native_rig import MIB, NativeRig, caching_model, native_rig

from torpor.actors.config import ClusterConfig, KvCacheConfig, ModelConfig, NodeBudget
from torpor.service.logs import make_logger
from torpor.service.serve import warn_of_small_host_tiers

TO_DISK = {"restore": {"weights": "disk", "kv_cache": "disk"}}
POOL_BYTES = 8 * PAGE_BYTES


async def asked(rig: NativeRig, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = await rig.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    record: dict[str, Any] = answer.json()
    return record


def unlinked_files(folder: Path) -> dict[int, int]:
    """By descriptor of this process, as the kernel says: bytes of files without a name in the folder."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()).startswith(f"{folder}/") and entry.stat().st_nlink == 0:
                found[int(entry.name)] = entry.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return found


def flip_first_byte(file: int) -> None:
    """Twice, and all is as before. Opened anew: the rank's own descriptor takes whole blocks only."""
    with Path(f"/proc/self/fd/{file}").open("r+b") as again:
        byte = again.read(1)[0]
        again.seek(0)
        again.write(bytes([byte ^ 1]))
        os.fsync(again.fileno())


async def disk_bytes_shown(rig: NativeRig) -> dict[str, int]:
    (rank,) = (await rig.http.get("/models/toy")).json()["ranks"]
    return {row["tag"]: row["disk_bytes"] for row in rank["memory"]}


async def test_all_tags_sleep_on_a_disk_and_come_back_byte_for_byte_k3_m1(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    model = caching_model(kv_cache=KvCacheConfig(host_bytes=0), verify=True)
    async with native_rig(tmp_path, model, NodeBudget(disk_path=str(disk))) as rig:
        before, awake_bytes = rig.engine.contents(), rig.free_bytes()
        done = await asked(rig, "/sleep", TO_DISK)
        assert (done["prefix_tokens_lost"], done["restore"]) == (0, TO_DISK["restore"])
        assert done["ranks"][0]["freed_bytes"] == WEIGHTS_BYTES + POOL_BYTES
        assert rig.free_bytes() == awake_bytes + WEIGHTS_BYTES + POOL_BYTES
        assert await disk_bytes_shown(rig) == {"weights": WEIGHTS_BYTES, "kv_cache": POOL_BYTES}
        assert sum(unlinked_files(disk).values()) >= WEIGHTS_BYTES + POOL_BYTES
        assert list(disk.iterdir()) == []
        await asked(rig, "/wake", {"verify": True})
        assert rig.engine.contents() == before
        assert rig.engine.found() == {"old": 8, "new": 12}
        assert await disk_bytes_shown(rig) == {"weights": 0, "kv_cache": 0}
        assert sum(unlinked_files(disk).values()) == 0


async def test_contents_that_were_damaged_asleep_fail_the_wake_and_the_model_sleeps_on_k13(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    async with native_rig(tmp_path, caching_model(), NodeBudget(disk_path=str(disk))) as rig:
        before = rig.engine.contents()
        await asked(rig, "/sleep", {**TO_DISK, "verify": True})
        (file,) = (number for number, size in unlinked_files(disk).items() if size)
        flip_first_byte(file)
        problem = await asked(rig, "/wake", {}, 409)
        assert problem["code"] == "contents_corrupt" and "sleeps on" in problem["hint"]
        model = (await rig.http.get("/models/toy")).json()
        assert (model["state"], model["parked_tags"]) == ("asleep", ["kv_cache", "weights"])
        flip_first_byte(file)
        await asked(rig, "/wake", {})
        assert rig.engine.contents() == before


async def test_whether_to_verify_follows_the_model_unless_the_request_says_k13(tmp_path: Path) -> None:
    for configured, asks, recorded in (
        (False, {}, False),
        (True, {}, True),
        (True, {"verify": False}, False),
    ):
        folder = tmp_path / f"{configured}-{len(asks)}"
        folder.mkdir()
        async with native_rig(folder, caching_model(verify=configured)) as rig:
            await asked(rig, "/sleep", {"restore": {"weights": "cpu"}, **asks})
            # Only what was recorded can be asked for.
            await asked(rig, "/wake", {"verify": True}, 200 if recorded else 409)
            if not recorded:
                await asked(rig, "/wake", {})


async def test_a_disk_that_is_too_small_refuses_with_its_bytes_and_changes_nothing_k9(tmp_path: Path) -> None:
    node = NodeBudget(disk_path=str(tmp_path), disk_bytes=MIB)
    async with native_rig(tmp_path, caching_model(), node) as rig:
        before = rig.engine.contents()
        problem = await asked(rig, "/sleep", {"tags": ["weights"], "restore": {"weights": "disk"}}, 507)
        assert problem["code"] == "disk_space"
        assert (problem["needed_bytes"], problem["free_bytes"]) == (WEIGHTS_BYTES, MIB)
        assert rig.engine.contents() == before


async def test_ranks_share_their_node_s_disk_and_the_budget_counts_them_all(tmp_path: Path) -> None:
    node = NodeBudget(disk_path=str(tmp_path), disk_bytes=3 * MIB)  # enough for either rank alone
    async with native_rig(tmp_path, caching_model(tensor_parallel=2), node) as rig:
        problem = await asked(rig, "/sleep", {"tags": ["weights"], "restore": {"weights": "disk"}}, 507)
        assert problem["code"] == "disk_space"
        assert (problem["needed_bytes"], problem["free_bytes"]) == (2 * WEIGHTS_BYTES, 3 * MIB)
        await asked(rig, "/sleep", {"tags": ["weights"]})


async def test_without_a_disk_the_mode_is_refused_and_says_what_to_set(tmp_path: Path) -> None:
    async with native_rig(tmp_path, caching_model()) as rig:
        problem = await asked(rig, "/sleep", TO_DISK, 409)
        assert "node.disk_path" in problem["detail"]


def cold_model(**tiers: Any) -> ModelConfig:
    return caching_model(kv_cache=KvCacheConfig(**tiers))


async def test_what_a_stage_has_evicted_is_told_when_the_sleep_is_rejected_k9_f26(tmp_path: Path) -> None:
    """The disk is as large as its tier: eight pages find places only where older ones have gone already."""
    tier_bytes = 8 * PAGE_BYTES
    model = cold_model(host_bytes=0, disk_bytes=tier_bytes)
    async with native_rig(tmp_path, model, NodeBudget(disk_path=str(tmp_path), disk_bytes=tier_bytes)) as rig:
        # Two blocks more: as many of `old` fall to the disk.
        rig.engine.compute("more", tuple(range(300, 308)))
        cache = rig.engine.cache
        assert cache.stats()["disk_pages"] == 2
        before = cache.stats()["prefix_tokens"]
        rig.device().delay("copy", 1.0)
        evict = {"tags": ["kv_cache"], "restore": {"kv_cache": "disk"}, "overflow": "evict"}
        problem = await asked(rig, "/sleep", {**evict, "timeout_s": 0.5}, 504)
        lost = before - cache.stats()["prefix_tokens"]
        assert lost == 2 * BLOCK
        assert problem["operation"]["prefix_tokens_lost"] == lost
        assert f"{lost} tokens of reusable prefixes were dropped" in problem["detail"]
        rig.device().delay("copy", 0.0)
        assert (await asked(rig, "/sleep", evict))["prefix_tokens_lost"] == 0
        await asked(rig, "/wake", {})
        assert cache.probe("new", NEW) == 12 and cache.probe("old", OLD) < 8


def test_a_host_tier_smaller_than_the_gpu_pool_only_warns_at_the_start_k8() -> None:
    log = io.StringIO()
    models = [
        ModelConfig(name, kv_cache=KvCacheConfig(gpu_bytes=2 * MIB, host_bytes=size))
        for name, size in (("none", 0), ("small", MIB), ("fine", 2 * MIB))
    ]
    warn_of_small_host_tiers(ClusterConfig(tuple(models)), make_logger(log))
    (line,) = [json.loads(text) for text in log.getvalue().splitlines()]
    assert (line["level"], line["model"]) == ("warning", "small")
    assert (line["host_bytes"], line["gpu_bytes"]) == (MIB, 2 * MIB)
