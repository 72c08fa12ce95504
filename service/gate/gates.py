"""How each model's gate is configured, as far as a front end knows by now."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from torpor.actors.config import ClusterConfig, GateConfig
from torpor.actors.ports import Control, ControlUnreachable

FRESH_S = 10.0


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
        self._learn(config)

    def known(self, model: str) -> GateConfig:
        """As last heard; the defaults for one that was not heard of."""
        return self._known.get(model, GateConfig())

    async def of(self, model: str) -> GateConfig:
        if self._control is not None and self._clock() - self._learned_s > FRESH_S:
            self._learned_s = self._clock()  # at once: whoever comes meanwhile takes what is known
            with contextlib.suppress(ControlUnreachable):
                self._learn(await self._control.describe())
        return self.known(model)

    def _learn(self, config: ClusterConfig) -> None:
        self._known = {model.name: model.gate for model in config.models}
        self._learned_s = self._clock()
