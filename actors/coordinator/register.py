"""The operations that run and those that have ended, as they are told to whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Mapping

from torpor.actors.coordinator.journal import Journal
from torpor.actors.coordinator.runtime import ModelRuntime, Run, as_running
from torpor.actors.messages import Operation, OperationRequest, OperationState

REMEMBERED = 1000  # finished operations at hand without asking the journal


class Register:
    """An operation is told as running until its end is written, and its model is settled."""

    def __init__(self, journal: Journal, models: Mapping[str, ModelRuntime]) -> None:
        self._journal = journal
        self._models = models
        self._runs: dict[str, Run] = {}
        self._finished: OrderedDict[str, Operation] = OrderedDict()
        self._ended = asyncio.Event()  # replaced whenever an operation ends

    def begin(self, run: Run) -> None:
        self._runs[run.operation.id] = run

    def end(self, run: Run) -> None:
        del self._runs[run.operation.id]
        self.remember(run.operation)

    def remember(self, operation: Operation) -> None:
        """It has ended."""
        self._finished[operation.id] = operation
        self._ended.set()
        self._ended = asyncio.Event()
        while len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)

    def running(self, operation_id: str) -> Run | None:
        return self._runs.get(operation_id)

    @property
    def idle(self) -> bool:
        """Nothing runs or waits."""
        return not self._runs

    async def wait(self, operation_id: str, timeout_s: float | None = None) -> Operation:
        """As Control.wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                # Not only those that run: one that a coordinator before this left open is being settled.
                while (await self.operation(operation_id)).state is OperationState.RUNNING:
                    await self._ended.wait()
        return await self.operation(operation_id)

    async def operation(self, operation_id: str) -> Operation:
        """KeyError for an unknown one."""
        found = await self.find(operation_id)
        if found is None:
            raise KeyError(f"no operation {operation_id!r}; the journal keeps the last ones only")
        return found

    async def find(self, operation_id: str) -> Operation | None:
        if operation_id in self._runs:
            return self._runs[operation_id].told()
        found = self._finished.get(operation_id) or await self._journal.operation(operation_id)
        return None if found is None else self._as_told(found)

    async def find_key(self, request: OperationRequest, now: float) -> Operation | None:
        """What the request's key stands for, where it has one that came before. Raises KeyReused."""
        if request.idempotency_key is None:
            return None
        known = await self._journal.find_key(request, now)
        return None if known is None else self._last(known)

    async def operations(self, model: str | None, limit: int) -> list[Operation]:
        """Newest first."""
        return [
            self._last(self._finished.get(found.id, found))
            for found in await self._journal.operations(model, limit)
        ]

    def _last(self, found: Operation) -> Operation:
        run = self._runs.get(found.id)
        return run.told() if run is not None else self._as_told(found)

    def _as_told(self, found: Operation) -> Operation:
        """What a coordinator before this left open runs until its model is settled."""
        runtime = self._models.get(found.model)
        return as_running(found) if runtime is not None and found.id in runtime.ending else found
