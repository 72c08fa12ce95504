"""How each model's gate is configured, as far as a front end knows by now."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from torpor.actors.config import ClusterConfig, GateConfig
from torpor.actors.ports import Control, ControlUnreachable

FRESH_S = 10.0
PATIENCE_S = 2.0  # with a model that was not heard of


class Gates:
    """Models may be made, and made anew otherwise, while this front end runs: the coordinator is asked now and then."""

    def __init__(
        self,
        config: ClusterConfig,
        control: Control | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """control None: the configuration is all there will be."""
        self._control = control
        self._clock = clock
        self._known: dict[str, GateConfig] = {}
        self._learned_s = 0.0
        self._learning: asyncio.Task[None] | None = None
        self._learn(config)

    def known(self, model: str) -> GateConfig:
        """As last heard; the defaults for one that was not heard of."""
        return self._known.get(model, GateConfig())

    async def of(self, model: str) -> GateConfig:
        """Requests to models that are known wait for nobody: they are served also while there is no coordinator."""
        stale = self._control is not None and self._clock() - self._learned_s > FRESH_S
        if stale and (self._learning is None or self._learning.done()):
            self._learning = asyncio.create_task(self._ask())
        if model not in self._known and self._learning is not None:
            await asyncio.wait((self._learning,), timeout=PATIENCE_S)
        return self.known(model)

    async def close(self) -> None:
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)

    async def _ask(self) -> None:
        assert self._control is not None
        with contextlib.suppress(ControlUnreachable):
            self._learn(await self._control.describe())
        self._learned_s = self._clock()  # or failed to: there is time until the next try

    def _learn(self, config: ClusterConfig) -> None:
        self._known = {model.name: model.gate for model in config.models}
        self._learned_s = self._clock()
