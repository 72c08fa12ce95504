"""Takes requests for operations: a key's operation, a refusal, one to join, or a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from torpor.actors.coordinator.acceptance import as_configured, conflict_of, refusal_of, unknown_hold
from torpor.actors.coordinator.journal import Journal
from torpor.actors.coordinator.records import effective_tags
from torpor.actors.coordinator.register import Register
from torpor.actors.coordinator.runtime import ModelRuntime, Run
from torpor.actors.coordinator.spans import OperationSpans
from torpor.actors.messages import Operation, OperationRequest, OperationState, Refusal


class Reception:
    """submitting: held while a request is decided on. start: begins what was taken and is in the journal."""

    def __init__(
        self,
        models: Mapping[str, ModelRuntime],
        journal: Journal,
        register: Register,
        submitting: asyncio.Lock,
        now: Callable[[], float],
        new_id: Callable[[], str],
        *,
        makes_ranks: bool,
        start: Callable[[ModelRuntime, Run], None],
    ) -> None:
        self._models = models
        self._journal = journal
        self._register = register
        self._submitting = submitting
        self._now = now
        self._new_id = new_id
        self._makes_ranks = makes_ranks
        self._start = start

    async def submit(self, request: OperationRequest) -> Operation:
        """As Control.submit."""
        request = as_configured(self._models.get(request.model), request)
        async with self._submitting:
            known = await self._register.find_key(request, self._now())
            if known is not None:
                return known
            runtime = self._models.get(request.model)
            refusal = refusal_of(self._models, request, makes_ranks=self._makes_ranks)
            if refusal is None and request.releases:
                refusal = unknown_hold(request, await self._register.find(request.releases))
            if runtime is None or refusal is not None:
                assert refusal is not None
                return await self._refuse(request, refusal)
            joined = runtime.joinable(request)
            if joined is not None:
                await self._journal.bind_key(request, joined.operation.id, self._now())
                return joined.told()
            refusal = conflict_of(runtime, request)
            if refusal is not None:
                return await self._refuse(request, refusal)
            run = Run(self._new_operation(runtime, request), request)
            runtime.accepting = run.operation.id
            try:
                await self._journal.begin(run.operation, request, self._now())
                self._start(runtime, run)
            finally:
                runtime.accepting = ""
            return run.told()

    def _new_operation(self, runtime: ModelRuntime | None, request: OperationRequest) -> Operation:
        known = runtime.published.tags if runtime is not None else ()
        return Operation(
            id=self._new_id(),
            kind=request.kind,
            model=request.model,
            state=OperationState.RUNNING,
            tags=list(effective_tags(request, known)),
            restore={tag: mode.value for tag, mode in request.restore.items()},
            created_at=self._now(),
            dry_run=request.dry_run,
            origin=request.origin,
        )

    async def _refuse(self, request: OperationRequest, refusal: Refusal) -> Operation:
        operation = self._new_operation(self._models.get(request.model), request)
        operation.state, operation.finished_at = OperationState.REJECTED, self._now()
        operation.code, operation.reason = refusal.code, refusal.reason
        await self._journal.begin(operation, request, self._now())
        OperationSpans(operation, request).end(operation)
        self._register.remember(operation)
        return operation
