"""Random schedules with holds, leases and automatic operations among the faults and crashes (G6, M6)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_rig import Rig
from coordinator_virtual_time import run
from test_schedules import Schedule

from torpor.actors.coordinator import MemoryRank
from torpor.actors.messages import Kind, ModelState, OnExpiry, OperationRequest, Origin

SEEDS = 200
BATCHES = 4
AUTOMATIC = (Origin.REQUEST, Origin.LEASE)


class HoldSchedule(Schedule):
    """refused: wakes on request that met a hold, so that it is known to have happened."""

    refused = 0

    def request(self) -> OperationRequest:
        wish = super().request()
        if self.random.random() < 0.4:
            origin = Origin.REQUEST if wish.kind is Kind.WAKE else Origin.IDLENESS
            return replace(wish, origin=origin, idempotency_key=None)
        if wish.kind is Kind.WAKE or self.random.random() < 0.3:
            return wish
        lease_s = self.random.choice((None, 2.0, 60.0))
        on_expiry = self.random.choice(list(OnExpiry)) if lease_s else OnExpiry.KEEP
        return replace(wish, lease_s=lease_s, on_expiry=on_expiry)

    def watch(self, moment: str, method: str, rank: MemoryRank) -> None:
        super().watch(moment, method, rank)
        runtime = self.rig.coordinator._models[rank.model]
        run_now, holds = runtime.running, runtime.published.holds
        if (moment, method) != ("before", "commit") or run_now is None or not holds:
            return
        asked = run_now.request
        mine = {hold.operation for hold in holds} == {asked.caller}
        if asked.kind is Kind.WAKE and asked.origin in AUTOMATIC and not mine:
            self.broken.append(f"a wake of origin {asked.origin} goes on under {holds}")

    async def check_holds(self) -> None:
        """Long after all leases have ended."""
        for view in await self.rig.coordinator.models():
            if view.hold and view.state is not ModelState.FAILED:
                if view.state is not ModelState.ASLEEP:
                    self.broken.append(f"{view.name} is {view.state} and held")
                if any(hold.lease_s is not None for hold in view.holds):
                    self.broken.append(f"{view.name} keeps a lease that has ended: {view.holds}")
        operations = await self.rig.coordinator.operations()
        self.refused += sum(operation.code == "held" for operation in operations)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_schedules_never_wake_on_request_what_is_held_and_end_every_lease(
    tmp_path: Path, batch: int
) -> None:
    refused = 0

    async def one(seed: int) -> int:
        schedule = HoldSchedule(Rig(tmp_path / f"journal-{seed}.db"), seed)
        try:
            await schedule.play()
            await schedule.settle()
            await schedule.check_holds()
            assert not schedule.broken, f"seed {seed}: " + "; ".join(schedule.broken[:5])
            return schedule.refused
        finally:
            await schedule.rig.stop()

    for seed in range(batch, SEEDS, BATCHES):
        refused += run(one(seed))
    assert refused, "no schedule met a hold"
