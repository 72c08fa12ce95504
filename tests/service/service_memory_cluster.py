"""A cluster in this process, in a thread and an event loop of its own, that commands come to and leave again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from torpor.actors.config import ClusterConfig
from torpor.actors.coordinator import Coordinator, Journal, MemoryCluster, MemoryMaker
from torpor.actors.ports import ControlUnreachable

GIB = 1 << 30


class JoinedCluster:
    """apply_command.Joined. unusable: why a coordinator that is started cannot work."""

    def __init__(self, folder: Path) -> None:
        self._journal_path = folder / "journal.db"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._journal: Journal | None = None
        self.coordinator: Coordinator | None = None
        self.maker: MemoryMaker
        self.started: list[ClusterConfig] = []
        self.unusable = ""
        self.dropped = False
        self.left = 0

    @property
    def control(self) -> Any:
        return _Control(self)

    def has_coordinator(self) -> bool:
        return self.coordinator is not None

    def start_coordinator(self, config: ClusterConfig) -> None:
        self.started.append(config)
        if self.unusable:
            return
        self.do(self._start(config))

    def drop_coordinator(self) -> None:
        self.dropped = True

    def shutdown(self) -> None:
        self.left += 1

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Over there, to its end."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self, config: ClusterConfig) -> None:
        devices = replace(config.device, count=4, host_capacity_bytes=GIB)
        cluster = MemoryCluster.build(replace(config, models=(), device=devices))
        self.maker = MemoryMaker(cluster)
        self._journal = await Journal.open(self._journal_path)
        models = await self._journal.models("one birth", config.models)
        self.coordinator = Coordinator(
            replace(config, models=tuple(models)), self._journal, host_limit_bytes=8 * GIB, maker=self.maker
        )
        await self.coordinator.start()

    def end(self) -> None:
        async def close() -> None:
            if self.coordinator is not None and self._journal is not None:
                await self.coordinator.close()
                await self._journal.close()

        self.do(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class _Control:
    """Calls in the caller's loop, work in the cluster's."""

    def __init__(self, cluster: JoinedCluster) -> None:
        self._cluster = cluster

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            if self._cluster.unusable:
                raise ControlUnreachable(self._cluster.unusable)
            method = getattr(self._cluster.coordinator, name)
            future = asyncio.run_coroutine_threadsafe(method(*arguments, **named), self._cluster._loop)
            return await asyncio.wrap_future(future)

        return call
