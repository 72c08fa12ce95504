"""Weights are saved, and host memory is made, before the first sleep that wants them (M8, M9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.caching_toy import GPU_PAGES, PAGE_BYTES, WEIGHTS_BYTES, CachingToy
from service_native_rig import MIB, NativeRig, caching_model, native_rig

from torpor.actors.config import HostPoolConfig, KvCacheConfig, NodeBudget
from torpor.actors.messages import RestoreMode

SLEEP_WEIGHTS = {"tags": ["weights"]}
BACKED = caching_model(prefill_backup=True)
POOL = HostPoolConfig(16 * MIB, prefill=True)
KV_BYTES = GPU_PAGES * PAGE_BYTES


class Constant(CachingToy):
    """Its weights change by updates alone."""

    immutable = True

    def change(self) -> None:
        self._weights.add_(1)
        self._region.contents_changed()


def kept_bytes(rig: NativeRig, tag: str = "weights") -> int:
    return sum(int(row["host_bytes"]) for row in rig.engine.ledger.memory() if row["tag"] == tag)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def settled(rig: NativeRig) -> None:
    """Whatever was to be made ahead is made, or given up."""
    await until(lambda: not rig.coordinator._ahead._busy)


async def operate(rig: NativeRig, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await rig.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    record: dict[str, Any] = answer.json()
    return record


def staged_bytes(record: dict[str, Any]) -> int:
    return sum(int(phase["bytes"]) for phase in record["phases"] if phase["name"] == "stage")


async def test_the_first_sleep_of_weights_copies_nothing_and_a_wake_has_every_byte_m9(tmp_path: Path) -> None:
    async with native_rig(tmp_path, BACKED, toy=Constant) as rig:
        contents, weights = rig.engine.contents(), rig.engine._weights.clone()
        await until(lambda: kept_bytes(rig) == WEIGHTS_BYTES)
        await settled(rig)
        record = await operate(rig, "/sleep", SLEEP_WEIGHTS)
        assert staged_bytes(record) == 0
        assert record["ranks"][0]["freed_bytes"] == WEIGHTS_BYTES
        await operate(rig, "/wake", {})
        assert torch.equal(rig.engine._weights, weights) and rig.engine.contents() == contents


async def test_without_the_key_the_first_sleep_copies_them(tmp_path: Path) -> None:
    async with native_rig(tmp_path, replace(BACKED, prefill_backup=False), toy=Constant) as rig:
        assert kept_bytes(rig) == 0
        assert staged_bytes(await operate(rig, "/sleep", SLEEP_WEIGHTS)) == WEIGHTS_BYTES


async def test_weights_that_changed_are_saved_anew_in_the_background_m9(tmp_path: Path) -> None:
    async with native_rig(tmp_path, BACKED, toy=Constant) as rig:
        engine = rig.engine
        assert isinstance(engine, Constant)
        await until(lambda: kept_bytes(rig) == WEIGHTS_BYTES)
        await settled(rig)
        engine.change()
        changed = engine._weights.clone()
        assert kept_bytes(rig) == 0
        await operate(rig, "/models/toy/pause", {})
        await operate(rig, "/models/toy/unpause", {})  # the end of any operation, as that of an update
        await until(lambda: kept_bytes(rig) == WEIGHTS_BYTES)
        await settled(rig)
        assert staged_bytes(await operate(rig, "/sleep", SLEEP_WEIGHTS)) == 0
        await operate(rig, "/wake", {})
        assert torch.equal(engine._weights, changed)


@pytest.mark.parametrize(
    ("node", "pool"),
    [
        (NodeBudget(host_bytes=WEIGHTS_BYTES - 1), HostPoolConfig(4 * MIB)),
        (NodeBudget(), HostPoolConfig(WEIGHTS_BYTES - 1)),
    ],
)
async def test_no_backup_is_made_that_the_node_or_the_pool_has_no_room_for_m8(
    tmp_path: Path, node: NodeBudget, pool: HostPoolConfig
) -> None:
    async with native_rig(tmp_path, BACKED, node, pool, toy=Constant) as rig:
        await settled(rig)
        assert (kept_bytes(rig), rig.coordinator.reserved_bytes()) == (0, 0)


async def test_a_backup_counts_in_the_budget_of_its_node_m8(tmp_path: Path) -> None:
    model = replace(
        BACKED, kv_cache=KvCacheConfig(host_bytes=4 * MIB), restore_modes={"kv_cache": RestoreMode.CPU}
    )
    async with native_rig(tmp_path, model, NodeBudget(host_bytes=WEIGHTS_BYTES + MIB), toy=Constant) as rig:
        await until(lambda: kept_bytes(rig) == WEIGHTS_BYTES)
        await settled(rig)
        refused = await rig.http.post("/sleep", json={"tags": ["kv_cache"]})
        assert (refused.status_code, refused.json()["code"]) == (507, "host_memory")
        await operate(rig, "/models/toy/trim", {})
        await operate(rig, "/sleep", {"tags": ["kv_cache"]})


async def test_a_failure_is_a_warning_and_the_sleep_does_it_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with native_rig(tmp_path, replace(BACKED, prefill_backup=False), toy=Constant) as rig:
        rig.device().fail_at(1)  # the first call of the backup
        with caplog.at_level(logging.WARNING):
            await rig.coordinator.adapt(BACKED)
            await settled(rig)
        assert "made nothing ahead of its next sleep" in caplog.text
        weights = rig.engine._weights.clone()
        assert (kept_bytes(rig), rig.coordinator.reserved_bytes()) == (0, 0)
        assert staged_bytes(await operate(rig, "/sleep", SLEEP_WEIGHTS)) == WEIGHTS_BYTES
        await operate(rig, "/wake", {})
        assert torch.equal(rig.engine._weights, weights)


async def test_the_key_counts_from_when_it_is_changed_in_place(tmp_path: Path) -> None:
    async with native_rig(tmp_path, replace(BACKED, prefill_backup=False), toy=Constant) as rig:
        await rig.coordinator.adapt(BACKED)
        await until(lambda: kept_bytes(rig) == WEIGHTS_BYTES)


def host_memory_made(rig: NativeRig) -> int:
    return rig.device().log().count("create_host")


async def test_with_the_pool_filled_the_first_sleep_takes_no_new_host_memory_m8(tmp_path: Path) -> None:
    """P2's host memory that is there, for weights and KV cache."""
    modes = {"weights": RestoreMode.PINNED, "kv_cache": RestoreMode.PINNED}
    model = caching_model(kv_cache=KvCacheConfig(host_bytes=KV_BYTES), restore_modes=modes)
    async with native_rig(tmp_path, model, host_pool=POOL) as rig:
        await until(lambda: rig.engine.ledger.host_idle_bytes >= WEIGHTS_BYTES)
        await settled(rig)
        contents, idle_bytes = rig.engine.contents(), rig.engine.ledger.host_idle_bytes
        assert (await rig.cores[0].status()).host_idle_bytes == idle_bytes <= POOL.bytes
        before = host_memory_made(rig)
        await operate(rig, "/sleep", {})
        assert host_memory_made(rig) == before
        assert rig.engine.ledger.host_idle_bytes < idle_bytes
        await operate(rig, "/wake", {})
        assert rig.engine.contents() == contents


async def test_idle_memory_counts_in_the_budget_of_its_node_and_is_given_back_on_request_m8(
    tmp_path: Path,
) -> None:
    async with native_rig(tmp_path, caching_model(), NodeBudget(host_bytes=3 * MIB), POOL) as rig:
        await until(lambda: rig.engine.ledger.host_idle_bytes == WEIGHTS_BYTES)
        await settled(rig)
        kept = rig.coordinator._execution.claims.kept_bytes()
        assert sum(kept.values()) == WEIGHTS_BYTES
        trimmed = await operate(rig, "/models/toy/trim", {})
        assert trimmed["freed_bytes"] == WEIGHTS_BYTES
        assert sum(rig.coordinator._execution.claims.kept_bytes().values()) == 0
