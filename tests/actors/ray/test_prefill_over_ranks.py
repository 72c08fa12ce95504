"""What ranks in processes of their own make ahead of their first sleep (M8)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ranks.torpors import MakeTorpor

from torpor.actors.messages import OperationState


async def test_each_rank_fills_its_share_of_the_pool_before_any_sleep_and_sleeps_out_of_it(
    make_torpor: MakeTorpor,
) -> None:
    torpor = make_torpor(
        ranks=2, adapt=lambda config: replace(config, host_pool=replace(config.host_pool, prefill=True))
    )
    await torpor.cluster.wait_until_loaded(120)
    async with asyncio.timeout(60):
        while not all(rank.host_idle_bytes for rank in (await torpor.control.model("toy")).ranks):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert (await torpor.sleep()).state is OperationState.SUCCEEDED
    assert not any(rank.host_idle_bytes for rank in (await torpor.control.model("toy")).ranks)
    assert (await torpor.wake()).state is OperationState.SUCCEEDED
