"""Kills a coordinator at its k-th step: a call to a rank or a write of the journal, before or after it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from coordinator_rig import Rig

from torpor.actors.coordinator import MemoryRank


class CrashPoint:
    """`arm` on the rig's present coordinator. What was under way on the ranks goes on without it."""

    def __init__(self, rig: Rig, at: int) -> None:
        self.at = at
        self.name_at = ""  # or: at the first step of this name
        self.step = 0
        self.name = ""  # of the step it died in
        self.dead = asyncio.Event()
        self._rig = rig
        self._victims: set[asyncio.Task[Any]] = set()

    @property
    def crashed(self) -> bool:
        return self.dead.is_set()

    def arm(self, *victims: asyncio.Task[Any]) -> None:
        """victims: tasks that live in the coordinator's process, besides its own."""
        self._victims = set(victims)
        for ranks in self._rig.cluster.ranks.values():
            for rank in ranks:
                rank.on_call = self._rank_call
        self._write = self._rig.journal._run
        self._rig.journal._run = self._journal_write  # type: ignore[method-assign]

    def disarm(self) -> None:
        self.at, self.name_at = 0, ""
        for ranks in self._rig.cluster.ranks.values():
            for rank in ranks:
                rank.on_call = None

    def _rank_call(self, moment: str, method: str, rank: MemoryRank) -> None:
        self._count(f"{moment} {method} of {rank.model}/{rank.rank}")

    async def _journal_write(self, work: Callable[..., Any], *args: Any) -> Any:
        if self._count(f"before journal{work.__name__}"):
            await asyncio.Event().wait()
        result = await self._write(work, *args)
        if self._count(f"after journal{work.__name__}"):
            await asyncio.Event().wait()
        return result

    def _count(self, name: str) -> bool:
        """True when the coordinator is dead now."""
        if not self.crashed:
            self.step += 1
            if self.step == self.at or name == self.name_at:
                self.name = name
                self.dead.set()
                for task in {*self._rig.coordinator._tasks, *self._victims}:
                    task.cancel()
        return self.crashed
