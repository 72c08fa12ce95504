"""Random faults, requests, crashes and cancellations, by seed; what must hold at every moment is looked at all along."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from coordinator_rig import KV_BYTES, RANK_BYTES, WEIGHTS_BYTES, Rig
from coordinator_virtual_time import run

from torpor.actors.coordinator import Fault, MemoryRank
from torpor.actors.messages import (
    Kind,
    LedgerPhase,
    ModelState,
    OnConflict,
    Operation,
    OperationRequest,
    OperationState,
    RankOutcome,
    RestoreMode,
)

SEEDS = 500
LONG_SEEDS = 100_000
BATCHES = 10
TAGS: list[tuple[str, ...] | None] = [None, None, ("weights",), ("kv_cache",)]
SIZES = {"weights": WEIGHTS_BYTES, "kv_cache": KV_BYTES}
METHODS = ("status", "preflight", "drain", "stage", "commit", "publish", "abort")
FAULTS = [Fault.REFUSE, Fault.RAISE, Fault.HANG, Fault.LOSE, Fault.STALE]


class Schedule:
    """One seed's cluster and what befalls it."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.broken: list[str] = []
        self.accepted: list[str] = []
        for ranks in rig.cluster.ranks.values():
            for rank in ranks:
                rank.on_call = self.watch

    def watch(self, moment: str, method: str, rank: MemoryRank) -> None:
        """What must hold at every moment."""
        leader, *followers = self.rig.cluster.ranks[rank.model]
        if leader.gate.open:
            for each in (leader, *followers):
                # A leader opens last, and a follower stages only behind a closed gate.
                if not each.dead and (each.ledger.parked or each.ledger.phase is not LedgerPhase.IDLE):
                    self.broken.append(f"gate open, rank {each.rank} {each.ledger.phase} {moment} {method}")
        if self.rig.cluster.devices[rank.rank].free_bytes < 0:
            self.broken.append(f"{rank.device.id} overcommitted {moment} {method}")

    def mishap(self) -> None:
        model = self.random.choice(("chat", "solo"))
        rank = self.random.choice(self.rig.cluster.ranks[model])
        method = self.random.choice(METHODS)
        if self.random.random() < 0.05:
            rank.fault(method, self.random.choice((Fault.DIE, Fault.DIE_AFTER)))
        elif method == "status":
            rank.fault(method, self.random.choice((Fault.HANG, Fault.RAISE, Fault.LOSE)))
        else:
            rank.fault(method, self.random.choice(FAULTS), self.random.choice((1, 1, 1, 2)))
        rank.delay_s[self.random.choice(METHODS)] = self.random.choice((0.0, 0.1, 1.0, 12.0))

    def request(self) -> OperationRequest:
        return OperationRequest(
            self.random.choice((Kind.SLEEP, Kind.WAKE)),
            self.random.choice(("chat", "solo")),
            tags=self.random.choice(TAGS),
            restore={"kv_cache": self.random.choice(list(RestoreMode))},
            on_conflict=self.random.choice(list(OnConflict)),
            dry_run=self.random.random() < 0.1,
            timeout_s=self.random.choice((None, None, 3.0, 40.0)),
            idempotency_key=self.random.choice((None, None, f"key-{self.random.randrange(10**9)}")),
        )

    async def play(self) -> None:
        await self.rig.start()
        for _ in range(self.random.randrange(3, 9)):
            for _ in range(self.random.randrange(3)):
                self.mishap()
            submitted = await self.rig.coordinator.submit(self.request())
            self.accepted.append(submitted.id)
            await asyncio.sleep(self.random.choice((0.0, 0.05, 0.5, 5.0, 100.0)))
            if self.random.random() < 0.2:
                await self.rig.coordinator.cancel(submitted.id)
            if self.random.random() < 0.2:
                await self.rig.restart()

    async def settle(self) -> list[Operation]:
        """Everything comes to an end, and agrees."""
        outcomes = [await self.rig.coordinator.wait(name, 5000.0) for name in self.accepted]
        await asyncio.sleep(5000.0)  # also of what is asked again in the background
        for model, ranks in self.rig.cluster.ranks.items():
            if any(rank.dead for rank in ranks):  # who made the ranks watches them
                await self.rig.coordinator.fail(model, "a rank has died")
        for model in self.rig.cluster.ranks:
            self.check_model(model)
        if self.rig.coordinator.reserved_bytes():
            self.broken.append(f"{self.rig.coordinator.reserved_bytes()} bytes promised to nobody")
        for outcome in outcomes:
            await self.check_outcome(outcome)
        return outcomes

    def check_model(self, model: str) -> None:
        ranks = self.rig.cluster.ranks[model]
        state = self.rig.coordinator.published_state(model)
        if state is ModelState.FAILED:
            return
        if state not in (ModelState.AWAKE, ModelState.ASLEEP):
            self.broken.append(f"{model} is {state} for ever")
            return
        for rank in ranks:
            parked = rank.ledger.parked
            if rank.dead or rank.ledger.phase is not LedgerPhase.IDLE:
                self.broken.append(
                    f"{model} is {state}, rank {rank.rank} dead={rank.dead} {rank.ledger.phase}"
                )
            if set(parked) != set(ranks[0].ledger.parked):
                self.broken.append(f"{model} is half asleep")
            if rank.dead:
                continue
            mapped = RANK_BYTES - sum(SIZES[tag] for tag in parked)
            if not rank.dead and rank.device.used[rank.ledger.owner] != mapped:
                self.broken.append(
                    f"{model}/{rank.rank} has {rank.device.used[rank.ledger.owner]}, not {mapped}"
                )
            if set(rank.ledger.kept) != {tag for tag, mode in parked.items() if mode.preserves}:
                self.broken.append(f"{model}/{rank.rank} keeps {rank.ledger.kept} for {parked}")
        asleep = bool(ranks[0].ledger.parked)
        if (state is ModelState.ASLEEP) is not asleep or ranks[0].gate.open is asleep:
            self.broken.append(
                f"{model}: {state}, gate open {ranks[0].gate.open}, parked {ranks[0].ledger.parked}"
            )

    async def check_outcome(self, outcome: Operation) -> None:
        decided = await self.rig.journal.is_decided(outcome.id)
        ends = {rank.outcome for rank in outcome.ranks}
        if outcome.state is OperationState.RUNNING or outcome.finished_at is None:
            self.broken.append(f"{outcome.id} never ended")
        elif outcome.state is OperationState.SUCCEEDED and not outcome.dry_run:
            if ends != {RankOutcome.COMMITTED}:
                self.broken.append(f"{outcome.id} succeeded with {ends}")
        elif outcome.state is OperationState.REJECTED and (RankOutcome.COMMITTED in ends or decided):
            self.broken.append(f"{outcome.id} was rejected, decided {decided}, with {ends}")
        if outcome.state is not OperationState.SUCCEEDED and not outcome.reason:
            self.broken.append(f"{outcome.id} is {outcome.state} without a reason")


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_schedules_keep_the_promises(tmp_path: Path, batch: int) -> None:
    """C4, C6, M6, F6, F8, F20, F25."""
    play(tmp_path, range(batch, SEEDS, BATCHES))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_random_schedules_keep_the_promises(tmp_path: Path) -> None:
    """As above. TORPOR_SCHEDULES sets how many; a seed that breaks a promise is told."""
    play(tmp_path, range(SEEDS, SEEDS + int(os.environ.get("TORPOR_SCHEDULES", LONG_SEEDS))))


def play(folder: Path, seeds: Iterable[int]) -> None:
    states: set[OperationState] = set()

    async def one(seed: int) -> None:
        schedule = Schedule(Rig(folder / f"journal-{seed}.db"), seed)
        try:
            await schedule.play()
            states.update(outcome.state for outcome in await schedule.settle())
            assert not schedule.broken, f"seed {seed}: " + "; ".join(schedule.broken[:5])
        finally:
            await schedule.rig.stop()

    for seed in seeds:
        run(one(seed))
        for left in folder.glob(f"journal-{seed}.db*"):  # many seeds fill a disk
            left.unlink()
    assert states == {OperationState.SUCCEEDED, OperationState.REJECTED, OperationState.FAILED}
