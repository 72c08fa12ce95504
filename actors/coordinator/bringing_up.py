"""Brings models up: makes the ranks of those that have none, and sees to it that all load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from torpor.actors.config import Deadlines
from torpor.actors.coordinator.loading import Loading
from torpor.actors.coordinator.recovery import stale_weights, to_park
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.ports import NoDeviceMemory, RankMaker, RankPort

log = logging.getLogger(__name__)


class BringUp:
    """One task a model, from its begin to its ranks' attachment or its failure."""

    def __init__(
        self,
        maker: RankMaker,
        loading: Loading,
        deadlines: Deadlines,
        epoch: Callable[[], int],
        attach: Callable[[str, Sequence[RankPort]], Awaitable[None]],
        fail: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._maker = maker
        self._loading = loading
        self._deadlines = deadlines
        self._epoch = epoch
        self._attach = attach
        self._fail = fail
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, runtime: ModelRuntime) -> None:
        """Ranks that are attached are left as they are, and load where they have not."""
        name = runtime.config.name
        task = self._tasks[name] = asyncio.create_task(self._bring_up(runtime))
        task.add_done_callback(lambda done: self._forget(name, done))

    async def stop(self, model: str) -> None:
        """Nothing is made or loaded for it any more. What there is already stays."""
        task = self._tasks.get(model)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        await asyncio.gather(*(self.stop(model) for model in list(self._tasks)))

    def _forget(self, model: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(model) is task:
            del self._tasks[model]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("bringing %s up ended with %r", model, error)

    async def _bring_up(self, runtime: ModelRuntime) -> None:
        model = runtime.config

        async def make() -> Sequence[RankPort]:
            made = await self._maker.make(model, self._epoch(), to_park(runtime.published))
            runtime.coming = made
            return made

        try:
            if runtime.ports:
                await self._loading.load(runtime)
            elif refusal := stale_weights(runtime.published, accepted=False):
                await self._fail(model.name, refusal.reason)
            else:
                await self._attach(model.name, await self._loading.make_and_load(runtime, make))
        except Exception as error:
            log.exception("model %s did not load", model.name)
            await self._fail(model.name, why_not_loaded(error, self._deadlines))
            with contextlib.suppress(Exception):  # it is failed already, and can be recovered or deleted
                await self._maker.end(model)  # ranks that hold memory and serve nobody help nobody
        finally:
            runtime.coming = ()


def why_not_loaded(error: Exception, deadlines: Deadlines) -> str:
    """For people. A TimeoutError is the load's own deadline."""
    if isinstance(error, TimeoutError):
        return f"not loaded within {deadlines.load_s:g} s; raise deadlines.load_s"
    if isinstance(error, NoDeviceMemory):
        return str(error)
    return f"{type(error).__name__}: {error}"
