"""The coordinator as a Ray actor: finds or makes the ranks, watches them, and answers Control.

Ray restarts it without end. Its constructor begins everything anew from the journal and from the ranks that live:
nobody needs to call it first.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

from torpor.actors.audit import AuditEntry
from torpor.actors.config import ClusterConfig, ModelConfig
from torpor.actors.coordinator.coordinator import Coordinator
from torpor.actors.coordinator.journal import Journal
from torpor.actors.coordinator.seating import Seating
from torpor.actors.limits import host_limit_bytes
from torpor.actors.messages import Hold, ModelView, Operation, OperationRequest, Trimmed
from torpor.actors.news import Changes, Position
from torpor.actors.ports import ControlUnreachable
from torpor.actors.ray.ranks import RayRanks
from torpor.actors.ray.raylet import end_with_raylet
from torpor.actors.tracing.provider import set_up as set_up_tracing


class CoordinatorActor:
    """Control, called from other processes. All of it runs in one event loop."""

    def __init__(self, config: ClusterConfig, birth: str) -> None:
        """birth: the same as long as Ray restarts it. With another one, config says anew which models there are."""
        end_with_raylet()
        set_up_tracing(os.environ)
        self._config = config
        self._birth = birth
        self._seating = Seating()
        self._journal: Journal | None = None
        self._ranks: RayRanks | None = None
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

    async def watch(self, name: str, seen: ModelView | None, timeout_s: float) -> ModelView:
        return await (await self._ready()).watch(name, seen, timeout_s)

    async def renew(self, operation_id: str) -> Hold:
        return await (await self._ready()).renew(operation_id)

    async def trim(self, name: str, target_bytes: int) -> list[Trimmed]:
        return await (await self._ready()).trim(name, target_bytes)

    async def changes(self, after: Position | None, wait_s: float) -> Changes:
        return await (await self._ready()).changes(after, wait_s)

    async def audit(self, entry: AuditEntry) -> None:
        await (await self._ready()).audit(entry)

    async def audits(self, limit: int = 100) -> list[AuditEntry]:
        return await (await self._ready()).audits(limit)

    async def models(self, detail: bool = False) -> list[ModelView]:
        return [self._seating.show(view) for view in await (await self._ready()).models(detail)]

    async def model(self, name: str) -> ModelView:
        return self._seating.show(await (await self._ready()).model(name))

    async def describe(self) -> ClusterConfig:
        return await (await self._ready()).describe()

    async def create(self, model: ModelConfig) -> ModelView:
        return await (await self._ready()).create(model)

    async def adapt(self, model: ModelConfig) -> ModelView:
        return await (await self._ready()).adapt(model)

    async def pid(self) -> int:
        return os.getpid()

    async def shutdown(self) -> None:
        """End the ranks, which gives their memory back, and close the journal. The actor is of no use afterwards."""
        journal, self._journal = self._journal, None
        if journal is None:
            return  # it was told before, or has not come so far as to have anything
        if not self._coordinator.done():
            self._coordinator.cancel()
        elif not self._coordinator.cancelled() and self._coordinator.exception() is None:
            await self._coordinator.result().end_service()
        if self._ranks is not None:
            await self._ranks.end_all()
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
        self._journal = journal = await Journal.open(self._config.journal_path)
        models = await journal.models(self._birth, self._config.models)
        config = replace(self._config, models=tuple(models))
        self._ranks = ranks = RayRanks(config, self._seating)
        await self._seating.open(journal, ranks.alive(models))
        limit_bytes = host_limit_bytes(config.node.host_bytes)
        coordinator = Coordinator(config, journal, host_limit_bytes=limit_bytes, maker=ranks)
        await coordinator.start()
        return coordinator
