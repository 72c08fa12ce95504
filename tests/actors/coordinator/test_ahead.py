"""What ranks are to make ahead of their next sleep: no more than the node has room for, and never in the way (M8, M9)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from coordinator_rig import CONFIG, MIB, RANK_BYTES, SLEEP, WAKE, Rig

from torpor.actors.config import ClusterConfig, HostPoolConfig, ModelConfig
from torpor.actors.coordinator.memory import Fault
from torpor.actors.messages import OperationState, RejectCode, RestoreMode

PREFILLING = replace(
    CONFIG,
    models=tuple(replace(model, prefill_backup=True) for model in CONFIG.models),
    host_pool=HostPoolConfig(400 * MIB),  # of four ranks
)


def rig_of(folder: Path, host_limit_bytes: int = 1 << 40, config: ClusterConfig = PREFILLING) -> Rig:
    rig = Rig(folder / "journal.db", config, host_limit_bytes)
    for ranks in rig.cluster.ranks.values():
        for rank in ranks:
            rank.prefill_bytes = 200 * MIB
    return rig


def spare_bytes(rig: Rig) -> list[int]:
    return sorted(rank.spare_host_bytes for ranks in rig.cluster.ranks.values() for rank in ranks)


def test_each_rank_may_make_its_share_of_the_pool_and_all_together_what_their_node_has(
    tmp_path: Path,
) -> None:
    for limit_bytes, made in ((1 << 40, [100 * MIB] * 4), (250 * MIB, [0, 50 * MIB, 100 * MIB, 100 * MIB])):
        rig = rig_of(tmp_path / str(limit_bytes), limit_bytes)
        rig.journal_path.parent.mkdir()

        async def story(rig: Rig = rig, made: list[int] = made) -> None:
            await asyncio.sleep(1)
            assert spare_bytes(rig) == made
            assert rig.coordinator.reserved_bytes() == 0

        rig.run(story)


def test_nothing_is_made_that_was_promised_to_an_operation_or_while_the_model_sleeps(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)

    async def story() -> None:
        await asyncio.sleep(1)
        begun = [rank.calls.count("prefill") for rank in rig.chat]
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED
        await asyncio.sleep(1)
        assert [rank.calls.count("prefill") for rank in rig.chat] == begun, "asleep"
        assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED
        await asyncio.sleep(1)
        assert [rank.calls.count("prefill") for rank in rig.chat] == [count + 1 for count in begun]

    rig.run(story)


def test_an_operation_does_not_wait_for_it_and_it_is_asked_for_anew_afterwards(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)
    for rank in rig.chat:
        rank.delay_s["prefill"] = 30.0

    async def story() -> None:
        await asyncio.sleep(1)
        began_s = rig.loop_time()
        for request in (SLEEP, WAKE):
            assert (await rig.do(request)).state is OperationState.SUCCEEDED
        assert rig.loop_time() - began_s < 5
        await asyncio.sleep(70)
        assert [rank.calls.count("prefill") for rank in rig.chat] == [2, 2, 2]

    rig.run(story)


def test_a_rank_that_cannot_keeps_no_other_from_it_and_the_model_serves(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)
    rig.chat[1].fault("prefill", Fault.RAISE)

    async def story() -> None:
        await asyncio.sleep(1)
        assert [rank.spare_host_bytes for rank in rig.chat] == [100 * MIB, 0, 100 * MIB]
        assert (rig.gate_open(), rig.coordinator.reserved_bytes()) == (True, 0)

    rig.run(story)


def test_what_one_model_keeps_ahead_gives_way_to_the_sleep_of_another_m8(tmp_path: Path) -> None:
    """Of solo's 100 MiB made ahead all goes, before chat's sleep would be refused."""
    rig = rig_of(tmp_path, 350 * MIB, replace(PREFILLING, models=(CONFIG.models[0], PREFILLING.models[1])))
    kept = {"weights": RestoreMode.PINNED, "kv_cache": RestoreMode.NONE}

    async def story() -> None:
        await asyncio.sleep(1)
        assert rig.solo.spare_host_bytes == 100 * MIB
        wanted = replace(SLEEP, restore=kept)
        plan = await rig.do(replace(wanted, dry_run=True))
        assert plan.state is OperationState.SUCCEEDED, plan.reason
        assert rig.solo.spare_host_bytes == 100 * MIB, "a dry run takes nothing from anybody"
        assert rig.coordinator.reserved_bytes() == 0
        slept = await rig.do(wanted)
        assert slept.state is OperationState.SUCCEEDED, slept.reason
        assert rig.solo.spare_host_bytes == 0 and rig.coordinator.reserved_bytes() == 0
        too_much = await rig.do(replace(SLEEP, model="solo", restore=kept))
        assert too_much.code is RejectCode.HOST_MEMORY, "what sleeps is kept"
        too_much = await rig.do(replace(SLEEP, model="solo", restore=kept, dry_run=True))
        assert too_much.code is RejectCode.HOST_MEMORY

    rig.run(story)


def test_who_keeps_most_on_other_nodes_is_not_asked_for_it_m8(tmp_path: Path) -> None:
    models = (
        CONFIG.models[0],
        PREFILLING.models[1],
        ModelConfig("wide", tensor_parallel=2, prefill_backup=True),
    )
    device = replace(CONFIG.device, host_capacity_bytes=3 * RANK_BYTES)
    config = replace(PREFILLING, models=models, device=device, host_pool=HostPoolConfig(600 * MIB))
    rig = rig_of(tmp_path, 450 * MIB, config)
    near, far = rig.cluster.ranks["wide"]
    far.node = "node-1"

    async def story() -> None:
        await asyncio.sleep(1)
        assert (rig.solo.spare_host_bytes, near.spare_host_bytes) == (100 * MIB, 100 * MIB)
        kept_far = far.spare_host_bytes
        assert kept_far > 0
        kept = {"weights": RestoreMode.PINNED, "kv_cache": RestoreMode.NONE}
        assert (await rig.do(replace(SLEEP, restore=kept))).state is OperationState.SUCCEEDED
        assert sorted((rig.solo.spare_host_bytes, near.spare_host_bytes)) == [0, 100 * MIB]
        assert far.spare_host_bytes == kept_far

    rig.run(story)


def test_a_model_that_keeps_nothing_is_not_asked_for_anything(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, 150 * MIB, CONFIG)

    async def story() -> None:
        await asyncio.sleep(1)
        refused = await rig.do(replace(SLEEP, restore={"weights": RestoreMode.PINNED}))
        assert refused.code is RejectCode.HOST_MEMORY
        assert "trim" not in rig.solo.calls

    rig.run(story)
