"""Sees ranks die, or their engines, also when nothing is asked of them; and has their models recovered (M6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from torpor.actors.config import RecoverPolicy
from torpor.actors.coordinator.recovery import stale_weights
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.messages import ModelState
from torpor.actors.ports import ControlUnreachable, RankMaker, RankPort, RankUnreachable

log = logging.getLogger(__name__)
WATCH_S = 1.0
MAX_ATTEMPTS = 3  # without a person, one after another
CALM_S = 60.0  # a model that was up for so long has its attempts back
FIRST_PAUSE_S = 2.0  # before the second attempt


@dataclass(slots=True)
class _Attempts:
    made: int = 0
    last_s: float = 0.0

    def due(self, now_s: float) -> bool:
        pause_s = FIRST_PAUSE_S * 2 ** (self.made - 1) if self.made else 0.0
        return self.made < MAX_ATTEMPTS and now_s >= self.last_s + pause_s


class Watch:
    """fail: publishes that a model is failed. recover: submits its recovery, and returns at once."""

    def __init__(
        self,
        models: Mapping[str, ModelRuntime],
        maker: RankMaker,
        fail: Callable[[str, str], Awaitable[None]],
        recover: Callable[[str], Awaitable[None]],
    ) -> None:
        self._models = models
        self._maker = maker
        self._fail = fail
        self._recover = recover
        self._told: dict[str, Sequence[RankPort]] = {}  # those that were; not those that replaced them
        self._attempts: dict[str, _Attempts] = {}

    async def run(self) -> None:
        """Without end."""
        while True:
            await asyncio.sleep(WATCH_S)
            for runtime in list(self._models.values()):
                await self._look_at(runtime)

    async def _look_at(self, runtime: ModelRuntime) -> None:
        name, state = runtime.config.name, runtime.state()
        if runtime.recovering or runtime.deleting:
            return
        if state is ModelState.FAILED and (runtime.doubt or runtime.settling.locked()):
            return  # told of ranks before these, which may be well: nobody must stop them
        if state is not ModelState.FAILED:
            self._told.pop(name, None)
            self._calm_down(runtime)
            ports = runtime.ports
            why = await self._look_after(runtime)
            if not why or runtime.ports is not ports or runtime.recovering or runtime.deleted:
                return
            stale = stale_weights(runtime.published, accepted=False)
            await self._fail(name, why if stale is None else f"{why}; {stale.reason}")
        if self._told.get(name) is not runtime.ports:
            # Its leader cannot see what became of the others in time: requests that it has begun would hang.
            self._told[name] = runtime.ports
            await self._maker.stop_serving(runtime.config, runtime.published.failed)
        await self._heal(runtime)

    async def _look_after(self, runtime: ModelRuntime) -> str:
        async def ask(port: RankPort) -> str:
            try:
                async with asyncio.timeout(WATCH_S):
                    status = await port.status()
            except RankUnreachable as error:
                return str(error)
            except Exception:
                return ""  # unknown is not failed
            return f"rank {port.rank}: {status.error}" if status.loaded and status.error else ""

        return "; ".join(filter(None, await asyncio.gather(*(ask(port) for port in runtime.ports))))

    async def _heal(self, runtime: ModelRuntime) -> None:
        was_up = bool(runtime.published.tags)  # one that never loaded would not load now
        wanted = (
            runtime.config.recover is RecoverPolicy.AUTO and was_up and not runtime.published.weights_version
        )
        if not wanted or runtime.queue:
            return
        attempts = self._attempts.setdefault(runtime.config.name, _Attempts())
        now_s = asyncio.get_running_loop().time()
        if not attempts.due(now_s):
            return
        try:
            await self._recover(runtime.config.name)
        except ControlUnreachable as error:  # the journal cannot be written: not begun, and no attempt
            log.error("%s is failed, and cannot be recovered: %s", runtime.config.name, error)
        else:
            attempts.made, attempts.last_s = attempts.made + 1, now_s

    def _calm_down(self, runtime: ModelRuntime) -> None:
        attempts = self._attempts.get(runtime.config.name)
        now_s = asyncio.get_running_loop().time()
        if attempts is not None and runtime.ready.is_set() and now_s > attempts.last_s + CALM_S:
            del self._attempts[runtime.config.name]
