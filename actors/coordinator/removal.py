"""Deletes a model: its gate closed, what runs drained, its ranks ended, its memory back, its records gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from torpor.actors.config import Deadlines
from torpor.actors.coordinator.budget import Place
from torpor.actors.coordinator.driver import GRACE_S
from torpor.actors.coordinator.execution import Execution
from torpor.actors.coordinator.journal import JournalError
from torpor.actors.coordinator.machine import Action
from torpor.actors.coordinator.runtime import ModelRuntime, Run
from torpor.actors.coordinator.spans import RankCall
from torpor.actors.messages import (
    ModelState,
    OperationState,
    Phase,
    PhaseCall,
    RankOutcome,
    RankRecord,
    Refusal,
    RejectCode,
)
from torpor.actors.ports import RankMaker, RankUnreachable

log = logging.getLogger(__name__)
_SERVING = (ModelState.AWAKE, ModelState.SLEEPING, ModelState.WAKING)


class Removal:
    """Carries out operations of kind delete. Once its decision is journaled, only forward, across restarts too."""

    def __init__(
        self,
        execution: Execution,
        maker: RankMaker,
        deadlines: Deadlines,
        stop_loading: Callable[[str], Awaitable[None]],
        forget: Callable[[ModelRuntime, Run], Awaitable[None]],
    ) -> None:
        """forget: journals the operation's end and drops the model with its records."""
        self._execution = execution
        self._maker = maker
        self._deadlines = deadlines
        self._stop_loading = stop_loading
        self._forget = forget

    async def run(self, runtime: ModelRuntime, run: Run) -> None:
        """From waiting for its turn to the journaled outcome."""
        if not run.resumed:
            refusal = await self._execution.take_turn(runtime, run)
            if refusal is None and runtime.state() in _SERVING:
                refusal = await self._drain(runtime, run)
            if refusal is not None:
                await self._execution.reject(runtime, run, refusal)
                return
            run.final = True
            refusal = await self._decide(runtime, run)
            if refusal is not None:
                await self._execution.reject(runtime, run, refusal)
                return
        await self._remove(runtime, run)

    async def _decide(self, runtime: ModelRuntime, run: Run) -> Refusal | None:
        """What could not be written did not happen: the model serves on."""
        try:
            await self._execution.write_decision(run)
        except JournalError as error:
            if runtime.deleting:
                await self._reopen(runtime, run)
            return Refusal(RejectCode.REFUSED, f"{error}; nothing was changed, delete it again")
        return None

    async def _drain(self, runtime: ModelRuntime, run: Run) -> Refusal | None:
        """Close the gate, and let what runs end or abort it, as asked. None also where nobody can be asked."""
        deadlines, spec = self._deadlines, run.request.drain
        self._execution.record_phase(run, Phase.DRAIN)
        runtime.deleting = True
        timeout_s = deadlines.drain_s if spec.timeout_s is None else spec.timeout_s
        lease_s = timeout_s + deadlines.commit_s + 2 * GRACE_S  # a coordinator that dies lets it open again
        leader = runtime.ports[0]
        refusal = None
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                with run.spans.call(leader.rank, Action.CALL_DRAIN) as traced:
                    call = self._phase_call(run, traced)
                    reply = traced.heard(await leader.drain(call, spec, timeout_s, lease_s))
            run.operation.aborted_requests = reply.aborted_requests
            if not reply.ok:
                refusal = reply.refusals[0]
        except RankUnreachable:
            return None
        except TimeoutError:
            refusal = Refusal(RejectCode.DRAIN_TIMEOUT, f"the leader did not answer within {timeout_s:g} s")
        except Exception as error:
            why = f"the leader did not drain: {type(error).__name__}: {error}; try again, or recover the model first"
            refusal = Refusal(RejectCode.RANK_FAILED, why)
        if refusal is None and run.cancelled:
            refusal = Refusal(RejectCode.CANCELLED, "cancelled before the decision; nothing was changed")
        if refusal is not None:
            await self._reopen(runtime, run)
        return refusal

    async def _reopen(self, runtime: ModelRuntime, run: Run) -> None:
        runtime.deleting = False
        leader = runtime.ports[0]
        try:
            async with asyncio.timeout(self._deadlines.commit_s):
                with run.spans.call(leader.rank, Action.CALL_ABORT) as traced:
                    traced.heard(await leader.abort(self._phase_call(run, traced)))
        except Exception as error:  # the drain's lease ends by itself
            log.warning("the leader of %s was not told to reopen: %r", runtime.config.name, error)

    def _phase_call(self, run: Run, traced: RankCall) -> PhaseCall:
        return PhaseCall(run.operation.id, Phase.DRAIN, self._execution.epoch, traced.traceparent)

    async def _remove(self, runtime: ModelRuntime, run: Run) -> None:
        operation, model = run.operation, runtime.config
        runtime.deleting = run.final = True
        self._execution.record_phase(run, Phase.END)
        await self._stop_loading(model.name)
        statuses = dict(runtime.statuses)
        operation.ranks = [RankRecord(rank) for rank in range(model.tensor_parallel)]
        try:
            await self._maker.end(model)
        except Exception as error:
            await self._fail(runtime, run, f"its ranks could not be ended: {_text(error)}; delete it again")
            return
        for record in operation.ranks:
            record.outcome = RankOutcome.COMMITTED
            status = statuses.get(record.rank)
            if status is None:
                continue
            record.node, record.device = status.node, status.device_id
            record.freed_bytes = sum(int(str(row.get("device_bytes", 0))) for row in status.memory)
            self._execution.claims.budget.gave_back(Place.of(status), record.freed_bytes)
        operation.state = OperationState.SUCCEEDED
        operation.phases[-1].bytes = sum(record.freed_bytes for record in operation.ranks)
        self._execution.end_record(run)
        try:
            await self._forget(runtime, run)
            run.spans.end(operation)
        except JournalError as error:
            await self._fail(
                runtime, run, f"its ranks are ended, its records are not: {error}; delete it again"
            )

    async def _fail(self, runtime: ModelRuntime, run: Run, reason: str) -> None:
        """It is there still, and can be deleted again."""
        operation = run.operation
        operation.state, operation.code, operation.reason = (
            OperationState.FAILED,
            RejectCode.RANK_FAILED,
            reason,
        )
        runtime.deleting = False
        try:
            await self._execution.finish(runtime, run, runtime.published.changed(failed=reason))
        finally:
            runtime.ready.set()  # failed is a state that is known: after a restart nobody else would say so


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
