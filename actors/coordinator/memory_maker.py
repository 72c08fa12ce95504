"""A RankMaker of in-process ranks, for tests of how models come, go and come back."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torpor.actors.config import ModelConfig
from torpor.actors.coordinator.memory import Held, MemoryCluster, MemoryGate, MemoryRank
from torpor.actors.coordinator.memory_ledger import MemoryLedger
from torpor.actors.messages import GateReason, RestoreMode
from torpor.actors.ports import NoDeviceMemory, RankPort

TAGS = {"weights": 100 << 20, "kv_cache": 50 << 20}  # bytes by tag


class MemoryMaker:
    """Ranks go in and out of the cluster given. delay_s: how long a method takes; held: those that
    wait for a word; errors: what it raises next; in_halves: loads have half of their memory while they last, and keep
    it where they fail, until their ranks end."""

    def __init__(self, cluster: MemoryCluster, tags: Mapping[str, int] | None = None) -> None:
        self.cluster = cluster
        self.calls: list[str] = []
        self.delay_s: dict[str, float] = {}
        self.held: dict[str, Held] = {}
        self.in_halves = False
        self.errors: dict[str, list[Exception]] = defaultdict(list)
        self._tags = dict(tags or TAGS)
        self._parked: dict[str, Mapping[str, RestoreMode]] = {}
        self._incarnations = itertools.count(2)

    async def find(self, model: ModelConfig) -> Sequence[RankPort] | None:
        ranks = self.cluster.ranks.get(model.name, [])
        return ranks if any(not rank.dead for rank in ranks) else None

    async def make(
        self, model: ModelConfig, epoch: int, parked: Mapping[str, RestoreMode]
    ) -> Sequence[RankPort]:
        await self._do("make")
        ranks = []
        for rank in range(model.tensor_parallel):
            device = self.cluster.devices[rank]
            owner = f"{model.name}/{rank}"
            assert not device.used.get(owner), f"{owner} has memory of ranks before"
            ledger = MemoryLedger(owner, device, dict(self._tags), dict(model.restore_modes), loaded=False)
            made = MemoryRank(model.name, rank, device, ledger, f"incarnation-{next(self._incarnations)}")
            made.loaded, made.epoch, made.gate = False, epoch, MemoryGate(False, GateReason.LOADING)
            ranks.append(made)
        self.cluster.ranks[model.name] = ranks
        self._parked[model.name] = parked
        return ranks

    async def load(self, model: ModelConfig) -> None:
        for rank in self.cluster.ranks[model.name] if self.in_halves else ():
            if rank.loaded:
                continue
            half_bytes = sum(rank.ledger.sizes.values()) // 2
            if not rank.device.take(rank.ledger.owner, half_bytes):
                raise NoDeviceMemory(f"not even {half_bytes} bytes")
        await self._do("load")
        parked = self._parked.get(model.name, {})
        for rank in self.cluster.ranks[model.name]:
            if rank.loaded or rank.dead:
                continue
            half_bytes = rank.device.used.pop(rank.ledger.owner, 0)
            try:
                rank.ledger.load(parked)
            except ValueError as error:
                rank.device.take(rank.ledger.owner, half_bytes)
                raise NoDeviceMemory(str(error)) from error
            rank.loaded = True
            rank.gate.settle(GateReason.ASLEEP if parked else None)

    async def end(self, model: ModelConfig) -> None:
        await self._do("end")
        for rank in self.cluster.ranks.pop(model.name, []):
            rank.die()

    async def stop_serving(self, model: ModelConfig, why: str) -> None:
        self.calls.append("stop_serving")
        for rank in self.cluster.ranks.get(model.name, [])[:1]:
            rank.gate.fail()

    async def _do(self, method: str) -> None:
        self.calls.append(method)
        await asyncio.sleep(self.delay_s.get(method, 0.0))
        if method in self.held:
            await self.held[method].pass_by()
        if self.errors[method]:
            raise self.errors[method].pop(0)
