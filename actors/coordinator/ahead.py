"""Host memory made ahead of sleeps: backups of weights (M9) and idle memory, within what the node may keep (M8)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from torpor.actors.config import ClusterConfig
from torpor.actors.coordinator.asking import ask_status
from torpor.actors.coordinator.budget import Need, Place
from torpor.actors.coordinator.claims import Claims
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.messages import ModelState, RankStatus
from torpor.actors.ports import RankPort

log = logging.getLogger(__name__)
ANSWER_S = 30.0  # beyond the time that a rank was given


class Ahead:
    """Has ranks make it in the background while they are awake; an operation goes first, and then it is asked anew."""

    def __init__(
        self,
        config: ClusterConfig,
        claims: Claims,
        models: Mapping[str, ModelRuntime],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._config = config
        self._claims = claims
        self._models = models
        self._spawn = spawn
        self._busy: set[ModelRuntime] = set()
        self._again: set[ModelRuntime] = set()

    def look(self, runtime: ModelRuntime) -> None:
        """To be called when a model has become awake, or its weights others; again does no harm."""
        if not (runtime.config.prefill_backup or self._config.host_pool.prefill) or not _serves(runtime):
            return
        if runtime in self._busy:
            self._again.add(runtime)
            return
        self._busy.add(runtime)
        self._spawn(self._make(runtime))

    async def _make(self, runtime: ModelRuntime) -> None:
        try:
            while True:
                self._again.discard(runtime)
                await asyncio.gather(*(self._make_one(runtime, port) for port in runtime.ports))
                if runtime not in self._again or not _serves(runtime):
                    return
        finally:
            self._busy.discard(runtime)
            self._again.discard(runtime)

    async def _make_one(self, runtime: ModelRuntime, port: RankPort) -> None:
        status = await ask_status(runtime, port)
        if not status.loaded:
            return
        place, promise = Place(status.node), f"ahead of sleeps: {runtime.config.name}, rank {port.rank}"
        room_bytes = self._room_bytes(place, status)
        need = Need(place, room_bytes, self._claims.free_host_bytes(status))
        if room_bytes <= 0 or self._claims.budget.reserve(promise, [need]) is not None:
            return
        made_bytes = 0
        try:
            made_bytes = await self._ask(runtime, port, room_bytes)
        except Exception as error:
            log.warning(
                "rank %d of %s made nothing ahead of its next sleep, which will: %s: %s",
                port.rank,
                runtime.config.name,
                type(error).__name__,
                error,
            )
        finally:
            self._claims.budget.release(promise, used=True)
            self._claims.budget.gave_back(place, max(0, room_bytes - made_bytes))
        if made_bytes:
            await ask_status(runtime, port)

    async def _ask(self, runtime: ModelRuntime, port: RankPort, room_bytes: int) -> int:
        deadlines = self._config.deadlines
        timeout_s = deadlines.stage_s + room_bytes / deadlines.stage_bytes_per_s
        async with asyncio.timeout(timeout_s + ANSWER_S):
            return await port.prefill(
                room_bytes, timeout_s, runtime.config.prefill_backup, self._config.host_pool.prefill
            )

    def _room_bytes(self, place: Place, status: RankStatus) -> int:
        """The rank's share of the pool, as far as the node has room that nobody was promised."""
        ranks = sum(each.config.tensor_parallel for each in self._models.values())
        free_bytes = self._claims.budget.free_bytes(place, self._claims.free_host_bytes(status))
        return min(self._config.host_pool.bytes // ranks, free_bytes)


def _serves(runtime: ModelRuntime) -> bool:
    return runtime.state() is ModelState.AWAKE and bool(runtime.ports)
