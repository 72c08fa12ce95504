"""A sleep that finds too little room for what it is to keep, over HTTP and down to the native ledger (K9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks.caching_toy import HELD, HELD_PAGES, PAGE_BYTES, PREFIX_TOKENS
from service_native_rig import NativeRig, caching_model, native_rig

from torpor.actors.config import KvCacheConfig, ModelConfig

KEPT = {"tags": ["kv_cache"], "restore": {"kv_cache": "pinned"}}
EVICT = {**KEPT, "overflow": "evict"}
WHOLE = {"old": 8, "new": 12}


def small_host(host_pages: int, ranks: int = 1) -> ModelConfig:
    return caching_model(kv_cache=KvCacheConfig(host_bytes=host_pages * PAGE_BYTES), tensor_parallel=ranks)


async def asked(rig: NativeRig, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = await rig.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    record: dict[str, Any] = answer.json()
    return record


async def test_overflow_evict_drops_prefixes_and_the_outcome_says_how_many_tokens_k9(tmp_path: Path) -> None:
    async with native_rig(tmp_path, small_host(5)) as rig:
        before = rig.engine.contents()
        planned = await asked(rig, "/sleep", {**EVICT, "dry_run": True})
        assert (planned["state"], planned["prefix_tokens_lost"]) == ("succeeded", 12)
        assert rig.engine.found() == WHOLE, "a dry run drops nothing"
        done = await asked(rig, "/sleep", EVICT)
        assert (done["state"], done["prefix_tokens_lost"]) == ("succeeded", 12)
        assert done["ranks"][0]["kept_bytes"] == 5 * PAGE_BYTES
        assert (await rig.http.get(f"/operations/{done['id']}")).json()["prefix_tokens_lost"] == 12
        await asked(rig, "/wake", {})
        assert rig.engine.found() == {"old": 0, "new": 8}
        assert rig.engine.contents() == before


async def test_what_does_not_fit_is_refused_with_its_bytes_and_loses_nothing_k9(tmp_path: Path) -> None:
    async with native_rig(tmp_path, small_host(5)) as rig:
        problem = await asked(rig, "/sleep", KEPT, 507)
        assert problem["code"] == "host_memory"
        assert (problem["needed_bytes"], problem["free_bytes"]) == (8 * PAGE_BYTES, 5 * PAGE_BYTES)
        assert "evict" in problem["hint"] and problem["operation"]["prefix_tokens_lost"] == 0
        assert rig.engine.found() == WHOLE
        assert (await asked(rig, "/sleep", {**KEPT, "dry_run": True}, 507))["code"] == "host_memory"


async def test_held_pages_that_do_not_fit_alone_are_refused_with_their_bytes_k9(tmp_path: Path) -> None:
    async with native_rig(tmp_path, small_host(2)) as rig:
        problem = await asked(rig, "/sleep", EVICT, 507)
        assert problem["code"] == "host_memory"
        assert (problem["needed_bytes"], problem["free_bytes"]) == (HELD_PAGES * PAGE_BYTES, 2 * PAGE_BYTES)
        assert rig.engine.found() == WHOLE
        assert rig.engine.contents()[1] == [token + 0.5 for token in HELD[::4]]


async def test_a_dry_run_of_a_discarding_sleep_tells_all_that_would_be_lost_k1(tmp_path: Path) -> None:
    async with native_rig(tmp_path, small_host(8)) as rig:
        planned = await asked(rig, "/sleep", {"dry_run": True})
        assert planned["prefix_tokens_lost"] == PREFIX_TOKENS
        assert (await asked(rig, "/sleep", {}))["prefix_tokens_lost"] == PREFIX_TOKENS


async def test_an_evicting_sleep_over_ranks_that_fails_on_one_loses_nothing_before_its_commit_m3(
    tmp_path: Path,
) -> None:
    async with native_rig(tmp_path, small_host(5, ranks=2)) as rig:
        rig.device(1).fail_at(1, True)
        problem = await asked(rig, "/sleep", EVICT, 409)
        assert problem["operation"]["prefix_tokens_lost"] == 0
        rig.device(1).fail_at(0)
        assert [engine.found() for engine in rig.engines] == [WHOLE] * 2
        assert (await asked(rig, "/sleep", EVICT))["prefix_tokens_lost"] == 12


@pytest.mark.parametrize("overflow", ["drop", True])
async def test_an_overflow_that_there_is_not_is_refused_by_name(tmp_path: Path, overflow: object) -> None:
    async with native_rig(tmp_path, small_host(5)) as rig:
        problem = await asked(rig, "/sleep", {**KEPT, "overflow": overflow}, 422)
        assert "overflow" in problem["detail"] and "'evict'" in problem["detail"]
