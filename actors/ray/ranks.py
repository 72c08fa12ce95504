"""A RankMaker over Ray: actors are made, found by name, ended, and their processes seen gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ray.actor import ActorHandle

from torpor.actors.config import ClusterConfig, ModelConfig
from torpor.actors.coordinator.seating import Seating
from torpor.actors.messages import RestoreMode
from torpor.actors.ports import NoDeviceMemory, RankPort
from torpor.actors.ray.calls import ActorGone, call
from torpor.actors.ray.launch import Launcher
from torpor.actors.ray.ports import RayRankPort
from torpor.actors.ray.processes import RankProcess, process_of, until_gone
from torpor.native.errors import OutOfDeviceMemory

ASK_S = 2.0
CLOSE_S = 10.0  # what ranks get to end by themselves
LOOK_S = 0.05
GONE_S = 30.0  # and the kernel to take back what they had


class RayRanks:
    """The ranks of one namespace, as the coordinator holds them."""

    def __init__(self, config: ClusterConfig, seating: Seating) -> None:
        self._config = config
        self._seating = seating
        self._models: dict[str, ModelConfig] = {model.name: model for model in config.models}
        self._handles: dict[str, list[ActorHandle | None]] = {}
        self._processes: dict[str, list[RankProcess]] = {}

    def alive(self, models: Sequence[ModelConfig]) -> list[str]:
        """Names of those that have any rank."""
        launcher = self._launcher()
        return [model.name for model in models if any(launcher.find(model))]

    async def find(self, model: ModelConfig) -> Sequence[RankPort] | None:
        """Also where some are gone: that is for the coordinator to find out, and to call failed."""
        self._models[model.name] = model
        found = self._launcher().find(model)
        if not any(found):
            return None
        self._handles[model.name] = found
        await self._note_processes(model, ASK_S)
        return _ports(found)

    async def make(
        self, model: ModelConfig, epoch: int, parked: Mapping[str, RestoreMode]
    ) -> Sequence[RankPort]:
        self._models[model.name] = model
        handles = list(await self._launcher().create(model, epoch, parked))
        self._handles[model.name] = list(handles)
        return _ports(handles)

    async def load(self, model: ModelConfig) -> None:
        """A model that lacks ranks is left as it is: whoever watches finds it so."""
        handles = self._living(model)
        if len(handles) == model.tensor_parallel:
            await self._note_processes(model, None)
            try:
                await self._launcher().load(model, handles)
            except Exception as error:
                if (lacking_bytes := _lacking_bytes(error)) is None:
                    raise
                raise NoDeviceMemory(f"{type(error).__name__}: {error}", lacking_bytes) from error

    async def end(self, model: ModelConfig) -> None:
        """Ranks may close their engines first, which gives memory back in order; then they are killed."""
        handles = self._living(model)
        await asyncio.gather(*(_tell(handle, CLOSE_S, "close") for handle in handles))
        launcher = self._launcher()
        launcher.remove(model)
        self._handles.pop(model.name, None)
        async with asyncio.timeout(GONE_S):
            await asyncio.gather(*(until_gone(process) for process in self._processes.get(model.name, [])))
        await _until_no_name_is_taken(launcher, model)
        self._processes.pop(model.name, None)
        self._models.pop(model.name, None)

    async def end_all(self) -> None:
        """Whatever is left, each within its time; nothing is said of what stays."""
        await asyncio.gather(
            *(self.end(model) for model in list(self._models.values())), return_exceptions=True
        )

    async def stop_serving(self, model: ModelConfig, why: str) -> None:
        await asyncio.gather(*(_tell(handle, ASK_S, "fail", why) for handle in self._living(model)))

    def _living(self, model: ModelConfig) -> list[ActorHandle]:
        return [handle for handle in self._handles.get(model.name, []) if handle is not None]

    def _launcher(self) -> Launcher:
        """For the models that there are now: they share GPUs, threads and pools."""
        return Launcher(replace(self._config, models=tuple(self._models.values())), self._seating)

    async def _note_processes(self, model: ModelConfig, timeout_s: float | None) -> None:
        """Which ones to see gone in the end."""

        async def ask(handle: ActorHandle) -> RankProcess | None:
            try:
                async with asyncio.timeout(timeout_s):
                    status = await call(handle, "status")
            except (ActorGone, TimeoutError):
                return None
            return process_of(status.node, status.pid)

        found = await asyncio.gather(*(ask(handle) for handle in self._living(model)))
        known = self._processes.setdefault(model.name, [])
        known += [process for process in found if process is not None and process not in known]


def _lacking_bytes(error: Exception) -> int | None:
    """None: it was not for want of device memory. Torch, which is not needed here, tells no bytes."""
    if isinstance(error, OutOfDeviceMemory):
        return max(0, error.needed_bytes - error.free_bytes)
    return 0 if type(error).__name__ == "OutOfMemoryError" else None


async def _until_no_name_is_taken(launcher: Launcher, model: ModelConfig) -> None:
    for _ in range(int(GONE_S / LOOK_S)):
        if not any(launcher.find(model)):
            return
        await asyncio.sleep(LOOK_S)
    raise TimeoutError(f"the actors of {model.name!r} do not end within {GONE_S:g} s; try again")


async def _tell(handle: ActorHandle, timeout_s: float, method: str, *arguments: object) -> None:
    """Whoever does not listen is ended otherwise."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(timeout_s):
            await call(handle, method, *arguments)


def _ports(handles: Sequence[ActorHandle | None]) -> list[RankPort]:
    return [RayRankPort(rank, handle) for rank, handle in enumerate(handles)]
