"""Policies change while a model lives, and stay changed; its ranks are not touched."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_rig import CONFIG, Rig, asking

from torpor.actors.config import GateConfig, KvCacheConfig
from torpor.actors.messages import Kind, ModelState
from torpor.actors.ports import ModelExists

CHAT = CONFIG.models[0]
PATIENT = replace(CHAT, gate=GateConfig(retry_after_s=9))


def test_a_policy_outlives_the_coordinator_and_no_rank_is_asked(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal.db")

    async def story() -> None:
        calls = [list(rank.calls) for rank in rig.chat]
        assert (await rig.coordinator.adapt(PATIENT)).name == "chat"
        assert [rank.calls for rank in rig.chat] == calls
        await rig.restart()
        assert (await rig.coordinator.describe()).models == (PATIENT, CONFIG.models[1])

    rig.run(story)


def test_another_shape_and_an_unknown_model_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal.db")
    bigger = replace(PATIENT, kv_cache=KvCacheConfig(gpu_bytes=1), tensor_parallel=1)

    async def story() -> None:
        with pytest.raises(
            ModelExists, match=r"shape \(tensor_parallel, kv_cache\.gpu_bytes\); delete it first"
        ):
            await rig.coordinator.adapt(bigger)
        with pytest.raises(KeyError, match="no model 'nobody'"):
            await rig.coordinator.adapt(replace(PATIENT, name="nobody"))
        assert (await rig.coordinator.describe()).models == CONFIG.models

    rig.run(story)


def test_another_time_to_idle_counts_at_once_and_none_ends_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal.db")

    async def asleep() -> bool:
        return (await rig.coordinator.model("chat")).state is ModelState.ASLEEP

    async def story() -> None:
        await rig.coordinator.adapt(replace(CHAT, sleep_after_idle_s=3600.0))
        await asyncio.sleep(100)
        await rig.coordinator.adapt(replace(CHAT, sleep_after_idle_s=150.0))
        await asyncio.sleep(40)
        assert not await asleep()
        await asyncio.sleep(40)
        assert await asleep(), "it had been idle for 100 s when the limit came"
        await rig.do(asking(Kind.WAKE))
        await rig.coordinator.adapt(CHAT)
        await asyncio.sleep(1000)
        assert not await asleep()

    rig.run(story)
