"""Random deaths, recoveries, deletions, makings, sleeps and crashes of the coordinator, by seed; all ends well."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_rig import CONFIG, PATIENCE_S, RANK_BYTES, Rig
from coordinator_virtual_time import run

from torpor.actors.config import RecoverPolicy
from torpor.actors.coordinator import MemoryRank
from torpor.actors.messages import (
    Kind,
    LedgerPhase,
    ModelState,
    OnConflict,
    OperationRequest,
    OperationState,
)
from torpor.actors.ports import ModelExists

SEEDS = 40
BATCHES = 2
KINDS = (Kind.SLEEP, Kind.WAKE, Kind.SLEEP, Kind.WAKE, Kind.RECOVER, Kind.DELETE)


class Schedule:
    """One seed's cluster, whose coordinator makes and ends ranks, and what befalls it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        policy = self.random.choice(list(RecoverPolicy))
        self.models = tuple(replace(model, recover=policy) for model in CONFIG.models)
        self.rig = Rig(folder / f"journal-{seed}.db", replace(CONFIG, models=self.models))
        self.maker = self.rig.with_maker()
        self.accepted: list[str] = []
        self.broken: list[str] = []

    def watch(self, moment: str, method: str, rank: MemoryRank) -> None:
        """What must hold at every moment: nobody is let in where anything is parked, staged or dead."""
        ranks = self.rig.cluster.ranks.get(rank.model, [])
        if rank not in ranks or not ranks[0].gate.open:
            return
        for each in ranks:
            if not each.dead and (each.ledger.parked or each.ledger.phase is not LedgerPhase.IDLE):
                self.broken.append(
                    f"{rank.model}: gate open {moment} {method}, rank {each.rank} {each.ledger.phase}"
                )

    async def play(self) -> None:
        await self.rig.start()
        for _ in range(self.random.randrange(4, 12)):
            for ranks in self.rig.cluster.ranks.values():
                for rank in ranks:
                    rank.on_call = self.watch
            await self.mishap()
            name = self.random.choice(("chat", "solo"))
            wait = self.random.choice(list(OnConflict))
            wish = OperationRequest(self.random.choice(KINDS), name, on_conflict=wait)
            self.accepted.append((await self.rig.coordinator.submit(wish)).id)
            await asyncio.sleep(self.random.choice((0.0, 0.05, 0.5, 1.5, 5.0, 100.0)))
            if self.random.random() < 0.25:
                await self.rig.restart()

    async def mishap(self) -> None:
        what = self.random.random()
        ranks = [rank for each in self.rig.cluster.ranks.values() for rank in each]
        if what < 0.3 and ranks:
            self.random.choice(ranks).die()
        elif what < 0.45:
            method = self.random.choice(("make", "load", "end"))
            self.maker.errors[method].append(RuntimeError("as the schedule has it"))
        elif what < 0.6:
            self.maker.delay_s = {self.random.choice(("make", "load", "end")): self.random.choice((0.3, 3.0))}
        elif what < 0.8:
            for model in self.models:
                try:
                    await self.rig.coordinator.create(model)
                except ModelExists:
                    continue

    async def settle(self) -> None:
        self.maker.errors.clear()
        self.maker.delay_s = {}
        for name in self.accepted:
            outcome = await self.rig.coordinator.wait(name, 10 * PATIENCE_S)
            if outcome.state is OperationState.RUNNING or outcome.finished_at is None:
                self.broken.append(f"{name} ({outcome.kind} of {outcome.model}) never ended")
            elif outcome.state is not OperationState.SUCCEEDED and not outcome.reason:
                self.broken.append(f"{name} is {outcome.state} without a reason")
        await asyncio.sleep(300.0)  # also of what a coordinator does by itself
        if self.rig.coordinator.reserved_bytes():
            self.broken.append("bytes promised to nobody")
        for name in list(self.rig.coordinator._models):
            await self.check(name)
        self.check_devices()

    async def check(self, model: str) -> None:
        """Whatever it is in the end, a person can have it back by a recover."""
        recovery = await self.rig.do(OperationRequest(Kind.RECOVER, model, on_conflict=OnConflict.WAIT))
        state = self.rig.coordinator.published_state(model)
        if recovery.state is not OperationState.SUCCEEDED or state not in (
            ModelState.AWAKE,
            ModelState.ASLEEP,
        ):
            self.broken.append(f"{model} is {state} after {recovery.state}: {recovery.reason}")
            return
        ranks = self.rig.cluster.ranks[model]
        parked = {frozenset(rank.ledger.parked) for rank in ranks}
        if any(rank.dead for rank in ranks) or len(parked) != 1:
            self.broken.append(
                f"{model} is {state}, its ranks {[(rank.dead, rank.ledger.parked) for rank in ranks]}"
            )
        if ranks[0].gate.open is not (state is ModelState.AWAKE):
            self.broken.append(f"{model} is {state}, its gate {ranks[0].gate}")

    def check_devices(self) -> None:
        """Nothing is left of ranks that were replaced or deleted."""
        for index, device in enumerate(self.rig.cluster.devices):
            expected = sum(
                RANK_BYTES
                for ranks in self.rig.cluster.ranks.values()
                for rank in ranks
                if rank.rank == index and not rank.ledger.parked
            )
            if sum(device.used.values()) != expected:
                self.broken.append(f"{device.id} has {device.used}, not {expected}")


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_dies_and_is_made_or_deleted_all_ends_well(tmp_path: Path, batch: int) -> None:
    """C4, C6, M6, F25."""

    async def one(seed: int) -> None:
        schedule = Schedule(tmp_path, seed)
        try:
            await schedule.play()
            await schedule.settle()
            assert not schedule.broken, f"seed {seed}: " + "; ".join(schedule.broken[:5])
        finally:
            await schedule.rig.stop()

    for seed in range(batch, SEEDS, BATCHES):
        run(one(seed))
