"""What an operation claims of nodes and devices: the bytes that its ranks need, and the devices' locks.

Everything that is summed over ranks is summed once for all of them, so that the work for one rank stays the same
however many there are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from torpor.actors.config import NodeBudget
from torpor.actors.coordinator.budget import Budget, Need, Place
from torpor.actors.coordinator.holds import HeldBytes
from torpor.actors.coordinator.machine import Machine
from torpor.actors.coordinator.runtime import ModelRuntime, Run
from torpor.actors.limits import UNLIMITED
from torpor.actors.messages import Kind, RankStatus, Refusal

Bytes = Mapping[Place, int]


class Claims:
    """budget: promises of running operations. held: what holds keep from automatic wakes."""

    def __init__(self, node: NodeBudget, models: Mapping[str, ModelRuntime], host_limit_bytes: int) -> None:
        self.budget = Budget()
        self.held = HeldBytes(models, self.budget)
        self._node = node
        self._models = models
        self._host_limit_bytes = host_limit_bytes
        self._device_locks: dict[Place, asyncio.Lock] = {}

    def reserve(self, runtime: ModelRuntime, run: Run, machine: Machine) -> Refusal | None:
        """All that it needs, or nothing and the reason."""
        return self.budget.reserve(run.operation.id, self._needs(runtime, run, machine))

    def lacking_bytes(self, runtime: ModelRuntime, run: Run, machine: Machine) -> dict[Place, int]:
        """Of devices, host memory and disks."""
        return self.budget.lacking_bytes(self._needs(runtime, run, machine))

    def _needs(self, runtime: ModelRuntime, run: Run, machine: Machine) -> list[Need]:
        needs: list[Need] = []
        runtime.statuses.update({slot.rank: slot.status for slot in machine.slots if slot.status is not None})
        kept, spare_bytes = self.kept_bytes(), self.held.spare_bytes(run.request)
        for slot in machine.slots:
            if slot.status is None:
                continue
            place = Place.of(slot.status)
            needs.append(
                Need(place, slot.device_bytes, slot.status.device_free_bytes, spare_bytes(slot.status))
            )
            if slot.plan is None:
                continue
            host, disk = Place(slot.status.node), Place(slot.status.node, disk=True)
            needs.append(Need(host, slot.plan.host_bytes, self._host_limit(slot.status) - kept[host]))
            limit = self._node.disk_bytes
            free = (UNLIMITED if limit is None else limit) - kept[disk]
            needs.append(Need(disk, slot.plan.disk_bytes, free))
        return needs

    def _host_limit(self, status: RankStatus) -> int:
        """As configured; else as the rank's own node has it, which may be another than the coordinator's."""
        if self._node.host_bytes is None and status.host_limit_bytes:
            return status.host_limit_bytes
        return self._host_limit_bytes

    def free_host_bytes(self, status: RankStatus) -> int:
        """Of the rank's node, as far as ranks have told; promises are not looked at."""
        return self._host_limit(status) - self.kept_bytes()[Place(status.node)]

    def kept_bytes(self) -> Counter[Place]:
        """Host memory and disk that ranks keep, by node, as they last told; also what is idle, for it is taken (M8)."""
        kept: Counter[Place] = Counter()
        for runtime in self._models.values():
            for status in runtime.statuses.values():
                host, disk = Place(status.node), Place(status.node, disk=True)
                kept[host] += status.host_idle_bytes
                for row in status.memory:
                    kept[host] += int(str(row.get("host_bytes", 0)))
                    kept[disk] += int(str(row.get("disk_bytes", 0)))
        return kept

    def give_back(self, machine: Machine, kept_before: Bytes) -> None:
        """What this operation has freed is there for others that hold promises now."""
        for slot in machine.slots:
            if slot.status is not None and slot.committed is not None and machine.request.kind is Kind.SLEEP:
                self.budget.gave_back(Place.of(slot.status), slot.committed.freed_bytes)
        kept = self.kept_bytes()
        nodes = {slot.status.node for slot in machine.slots if slot.status is not None}
        for place, before in kept_before.items():
            if place.node in nodes:
                self.budget.gave_back(place, max(0, before - kept[place]))

    async def take_locks(self, run: Run, machine: Machine) -> None:
        """All devices of the model, in one order for all: no two operations wait for each other (C4)."""
        places = {Place.of(slot.status) for slot in machine.slots if slot.status is not None}
        for place in sorted(places, key=lambda place: (place.node, place.device)):
            lock = self._device_locks.setdefault(place, asyncio.Lock())
            await lock.acquire()
            run.locks.append(lock)
