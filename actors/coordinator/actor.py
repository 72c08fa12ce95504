"""The coordinator as a Ray actor: finds or makes the ranks, watches them, and answers Control.

Ray restarts it without end. Its constructor begins everything anew from the journal and from the ranks that live:
nobody needs to call it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine, Sequence
from typing import Any

from ray.actor import ActorHandle

from torpor.actors.config import ClusterConfig, ModelConfig
from torpor.actors.coordinator.budget import host_limit_bytes
from torpor.actors.coordinator.coordinator import Coordinator
from torpor.actors.coordinator.journal import Journal
from torpor.actors.coordinator.seating import Seating
from torpor.actors.messages import Hold, ModelState, ModelView, Operation, OperationRequest
from torpor.actors.ports import ControlUnreachable, RankUnreachable
from torpor.actors.ray.calls import ActorGone, call
from torpor.actors.ray.launch import Launcher
from torpor.actors.ray.ports import RayRankPort

WATCH_S = 1.0
CLOSE_S = 10.0  # what ranks get to end by themselves
log = logging.getLogger(__name__)


class CoordinatorActor:
    """Control, called from other processes. All of it runs in one event loop."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._seating = Seating()
        self._launcher = Launcher(config, self._seating)
        self._tasks: set[asyncio.Task[None]] = set()
        self._handles: dict[str, list[ActorHandle | None]] = {}
        self._journal: Journal | None = None
        self._coordinator: asyncio.Task[Coordinator] = asyncio.get_running_loop().create_task(self._begin())

    # --- Control ---

    async def submit(self, request: OperationRequest) -> Operation:
        return await (await self._ready()).submit(request)

    async def wait(self, operation_id: str, timeout_s: float | None = None) -> Operation:
        return await (await self._ready()).wait(operation_id, timeout_s)

    async def operation(self, operation_id: str) -> Operation:
        return await (await self._ready()).operation(operation_id)

    async def operations(self, model: str | None = None, limit: int = 100) -> list[Operation]:
        return await (await self._ready()).operations(model, limit)

    async def cancel(self, operation_id: str) -> bool:
        return await (await self._ready()).cancel(operation_id)

    async def renew(self, operation_id: str) -> Hold:
        return await (await self._ready()).renew(operation_id)

    async def models(self, detail: bool = False) -> list[ModelView]:
        return [self._seating.show(view) for view in await (await self._ready()).models(detail)]

    async def model(self, name: str) -> ModelView:
        return self._seating.show(await (await self._ready()).model(name))

    async def describe(self) -> ClusterConfig:
        return await (await self._ready()).describe()

    async def pid(self) -> int:
        return os.getpid()

    async def shutdown(self) -> None:
        """End the ranks, which gives their memory back, and close the journal. The actor is of no use afterwards."""
        for task in list(self._tasks):
            task.cancel()
        if not self._coordinator.done():
            self._coordinator.cancel()
        elif not self._coordinator.cancelled() and self._coordinator.exception() is None:
            await self._coordinator.result().close()
        handles = [handle for each in self._handles.values() for handle in each if handle is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(call(handle, "close") for handle in handles), return_exceptions=True)
        for model in self._config.models:
            self._launcher.remove(model)
        journal, self._journal = self._journal, None
        if journal is not None:
            await journal.close()

    # --- life ---

    async def _ready(self) -> Coordinator:
        try:
            return await asyncio.shield(self._coordinator)
        except asyncio.CancelledError:
            if not self._coordinator.cancelled():
                raise  # this call was given up, not the coordinator
            raise ControlUnreachable("the coordinator is shutting down") from None
        except Exception as error:
            raise ControlUnreachable(
                f"the coordinator cannot work: {type(error).__name__}: {error}"
            ) from error

    async def _begin(self) -> Coordinator:
        self._journal = await Journal.open(self._config.journal_path)
        limit_bytes = host_limit_bytes(self._config.node.host_bytes)
        coordinator = Coordinator(self._config, self._journal, host_limit_bytes=limit_bytes)
        missing = []
        for model in self._config.models:
            found = self._launcher.find(model)
            if any(found):
                # Also where some are gone: that is for the coordinator to find out, and to call failed.
                self._handles[model.name] = found
                await coordinator.attach(model.name, _ports(found))
            else:
                missing.append(model)
        await self._seating.open(self._journal, self._handles)
        await coordinator.start()
        for model in self._config.models:
            self._spawn(self._bring_up(coordinator, model, make=model in missing))
        self._spawn(self._watch(coordinator))
        return coordinator

    async def _bring_up(self, coordinator: Coordinator, model: ModelConfig, make: bool) -> None:
        """Make the ranks where there are none, and see to it that they load; ranks that have loaded are left alone."""
        try:
            if make:
                self._handles[model.name] = list(await self._launcher.create(model, coordinator.epoch))
            handles = [handle for handle in self._handles[model.name] if handle is not None]
            if len(handles) == model.tensor_parallel:
                async with asyncio.timeout(self._config.deadlines.load_s):
                    await self._launcher.load(model, handles)
            if make:
                await coordinator.attach(model.name, _ports(handles))
        except Exception as error:
            log.exception("model %s did not load", model.name)
            limit_s = self._config.deadlines.load_s
            out_of_time = f"not loaded within {limit_s:g} s; raise deadlines.load_s"
            why = out_of_time if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            await coordinator.fail(model.name, why)
            self._launcher.remove(model)  # ranks that hold memory and serve nobody help nobody
            self._handles.pop(model.name, None)

    async def _watch(self, coordinator: Coordinator) -> None:
        """Find ranks that have died, or whose engine has, also when nothing is asked of them.

        A model may fail in an operation before it is seen here; its leader must be told all the same, or requests
        that it has begun would hang.
        """
        told: set[str] = set()
        while True:
            await asyncio.sleep(WATCH_S)
            for view in await coordinator.models():
                if view.state is not ModelState.FAILED:
                    told.discard(view.name)
                    why = await self._look_after(view.name)
                    if not why:
                        continue
                    await coordinator.fail(view.name, f"{why}; restart the service to load the model anew")
                elif view.name in told:
                    continue
                else:
                    why = view.error
                told.add(view.name)
                await self._stop_serving(view.name, why)

    async def _look_after(self, model: str) -> str:
        ports = _ports(self._handles.get(model, []))

        async def ask(port: RayRankPort) -> str:
            try:
                async with asyncio.timeout(WATCH_S):
                    status = await port.status()
            except RankUnreachable as error:
                return str(error)
            except TimeoutError:
                return ""  # unknown is not failed
            return f"rank {port.rank}: {status.error}" if status.loaded and status.error else ""

        return "; ".join(filter(None, await asyncio.gather(*(ask(port) for port in ports))))

    async def _stop_serving(self, model: str, why: str) -> None:
        # The leader cannot see what became of the others in time: its requests would hang.
        for handle in self._handles.get(model, []):
            if handle is not None:
                with contextlib.suppress(ActorGone, TimeoutError):
                    async with asyncio.timeout(WATCH_S):
                        await call(handle, "fail", why)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _ports(handles: Sequence[ActorHandle | None]) -> list[RayRankPort]:
    return [RayRankPort(rank, handle) for rank, handle in enumerate(handles)]
