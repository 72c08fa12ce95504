"""How long nothing has been asked of a model: what idle sleeps and room for others are decided by."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.messages import ModelState, RankStatus
from torpor.actors.ports import RankPort

LEAST_AWAKE_S = 5.0  # who was woken and has served nobody yet is not idle, but about to serve

AskStatus = Callable[[ModelRuntime, RankPort], Awaitable[RankStatus]]


class Usage:
    """Awake times of this coordinator's own, requests as leaders tell them. status: asks one rank; never raises."""

    def __init__(self, status: AskStatus) -> None:
        self._status = status
        self._awake_since_s: dict[str, float] = {}

    def look(self, runtime: ModelRuntime) -> None:
        """To be called when the model's state may have changed."""
        name = runtime.config.name
        if runtime.state() is not ModelState.AWAKE:
            self._awake_since_s.pop(name, None)
        else:
            self._awake_since_s.setdefault(name, asyncio.get_running_loop().time())

    async def idle_s(self, runtime: ModelRuntime) -> float | None:
        """Seconds that it has been awake with its gate open and nobody inside; None where that is not so, or unknown.

        Nothing of it is counted that lies before its waking.
        """
        told = await self._ask(runtime)
        return None if told is None else min(told)

    async def free_to_sleep_s(self, runtime: ModelRuntime) -> float | None:
        """As idle_s, for giving way to another model: None also for one that was woken and has served nobody yet."""
        told = await self._ask(runtime)
        if told is None:
            return None
        quiet_s, awake_s = told
        has_served = quiet_s < awake_s
        return min(told) if has_served or awake_s >= LEAST_AWAKE_S else None

    async def _ask(self, runtime: ModelRuntime) -> tuple[float, float] | None:
        """(seconds without a request, seconds awake)"""
        since_s = self._awake_since_s.get(runtime.config.name)
        if since_s is None or not _at_rest(runtime) or not runtime.ports:
            return None
        leader = await self._status(runtime, runtime.ports[0])
        quiet = leader.loaded and leader.gate_open and not leader.live_sequences and not leader.error
        if not quiet or not _at_rest(runtime):
            return None
        return leader.idle_s, asyncio.get_running_loop().time() - since_s


def _at_rest(runtime: ModelRuntime) -> bool:
    return runtime.state() is ModelState.AWAKE and not runtime.queue
