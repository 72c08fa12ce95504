"""Settles models in the end: once when their ranks are there, and again and again while anything is in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from torpor.actors.coordinator.care import Care
from torpor.actors.coordinator.feed import Feed
from torpor.actors.coordinator.reconcile import Reconciler
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.messages import Operation

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0  # between questions to a rank that is silent after a restart


class Settling:
    """remember: of an operation that has ended. spawn: runs work in the background."""

    def __init__(
        self,
        reconciler: Reconciler,
        care: Care,
        feed: Feed,
        *,
        remember: Callable[[Operation], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._reconciler = reconciler
        self._care = care
        self._feed = feed
        self._remember = remember
        self._spawn = spawn
        self._asked: set[ModelRuntime] = set()  # again and again
        self._untold: dict[ModelRuntime, list[Operation]] = {}

    async def settle(self, runtime: ModelRuntime) -> None:
        """Once now; what stays in doubt, in the background, so that others need not wait for it."""
        runtime.silent_since_s = None
        await self._once(runtime)
        self.look(runtime)

    async def end_orphan(self, operation: Operation, decided: bool) -> None:
        """Of a model that is not there any more."""
        await self._reconciler.end_orphan(operation, decided)
        self._remember(operation)

    def look(self, runtime: ModelRuntime) -> None:
        """To be called when the model may be in doubt; again does no harm."""
        if runtime.doubt and runtime not in self._asked:
            self._asked.add(runtime)
            runtime.silent_since_s = None
            self._spawn(self._until_known(runtime))

    async def _until_known(self, runtime: ModelRuntime) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                await asyncio.sleep(pause_s)
                # Settled by somebody else meanwhile, it may serve: to ask anew would close it to requests for nothing.
                if not runtime.doubt or runtime.deleted:
                    return
                await self._once(runtime)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._asked.discard(runtime)

    async def _once(self, runtime: ModelRuntime) -> None:
        ended = self._untold.pop(runtime, []) + await self._reconciler.settle(runtime)
        if runtime.published.failed and runtime.doubt:
            # As told last; its ranks may be well all the same. Who hears of a success must not find it failed.
            self._untold[runtime] = ended
        else:
            runtime.ending.clear()
            for operation in ended:
                self._remember(operation)
                self._feed.add(operation=operation)
        self._care.look(runtime)
        self._feed.add(model=runtime.view())
