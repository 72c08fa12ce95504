"""Puts models to sleep of which nothing was asked for long enough (`sleep_after_idle_s`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.coordinator.usage import Usage
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    Kind,
    Operation,
    OperationRequest,
    OperationState,
    Origin,
)
from torpor.actors.ports import ControlUnreachable

log = logging.getLogger(__name__)
SHORTEST_LOOK_S = 0.05
LONGEST_LOOK_S = 1.0  # while there is nothing to count
PAUSE_S = 30.0  # after a sleep that was refused, at least


def idle_sleep(model: str, origin: Origin) -> OperationRequest:
    """With the model's own restore modes; refused where anything runs."""
    return OperationRequest(Kind.SLEEP, model, drain=DrainSpec(DrainMode.IF_IDLE), origin=origin)


@dataclass(eq=False)
class _Watched:
    limit_s: float  # that is counted towards now
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class IdleWatch:
    """One task for each model that wants it. Whoever sleeps by it wakes on request: it is no hold (G6)."""

    def __init__(
        self,
        models: Mapping[str, ModelRuntime],
        usage: Usage,
        carry_out: Callable[[OperationRequest], Awaitable[Operation]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._models = models
        self._usage = usage
        self._carry_out = carry_out
        self._spawn = spawn
        self._watched: dict[ModelRuntime, _Watched] = {}  # a model made anew is another one

    def look(self, runtime: ModelRuntime) -> None:
        """To be called when the model is there, and when its policy has changed; again does no harm."""
        limit_s, watched = runtime.config.sleep_after_idle_s, self._watched.get(runtime)
        if watched is None and limit_s is not None:
            self._watched[runtime] = _Watched(limit_s)
            self._spawn(self._watch(runtime))
        elif watched is not None and watched.limit_s != limit_s:
            watched.changed.set()

    async def _watch(self, runtime: ModelRuntime) -> None:
        name, watched = runtime.config.name, self._watched[runtime]
        while self._models.get(name) is runtime:
            limit_s = runtime.config.sleep_after_idle_s
            if limit_s is None:
                break
            watched.limit_s = limit_s
            watched.changed.clear()
            idle_s = await self._usage.idle_s(runtime)
            pause_s = LONGEST_LOOK_S if idle_s is None else limit_s - idle_s
            if idle_s is not None and idle_s >= limit_s:
                pause_s = LONGEST_LOOK_S if await self._sleep(name) else max(PAUSE_S, limit_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(watched.changed.wait(), max(SHORTEST_LOOK_S, pause_s))
        del self._watched[runtime]

    async def _sleep(self, name: str) -> bool:
        try:
            operation = await self._carry_out(idle_sleep(name, Origin.IDLENESS))
        except ControlUnreachable as error:  # the journal cannot be written
            log.error("%s is idle, and cannot be put to sleep: %s", name, error)
            return False
        return operation.state is OperationState.SUCCEEDED
