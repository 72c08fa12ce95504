"""Recovers a failed model: all its ranks are replaced, towards the state that was published last (M6)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from torpor.actors.config import Deadlines, ModelConfig
from torpor.actors.coordinator.execution import Execution
from torpor.actors.coordinator.loading import Loading
from torpor.actors.coordinator.records import Published
from torpor.actors.coordinator.runtime import ModelRuntime, Run
from torpor.actors.messages import (
    ModelState,
    OperationState,
    Phase,
    RankOutcome,
    RankRecord,
    Refusal,
    RejectCode,
    RestoreMode,
)
from torpor.actors.ports import NoDeviceMemory, RankMaker

log = logging.getLogger(__name__)


class Recovery:
    """Carries out operations of kind recover. One that a coordinator before this has left open begins anew."""

    def __init__(
        self,
        execution: Execution,
        maker: RankMaker,
        loading: Loading,
        deadlines: Deadlines,
        settle: Callable[[ModelRuntime], Awaitable[None]],
        bring_up: Callable[[ModelRuntime], None],
    ) -> None:
        self._execution = execution
        self._maker = maker
        self._loading = loading
        self._deadlines = deadlines
        self._settle = settle
        self._bring_up = bring_up

    async def run(self, runtime: ModelRuntime, run: Run) -> None:
        """From waiting for its turn to the journaled outcome."""
        refusal = None if run.resumed else await self._execution.take_turn(runtime, run)
        published = runtime.published
        healthy = not (published.failed or published.undefined_tags or run.resumed)
        if refusal is None:
            refusal = self._refusal(runtime, run, healthy)
        if refusal is not None:
            runtime.recovering = False
            await self._execution.reject(runtime, run, refusal)
            if run.resumed:
                await self._leave(runtime)
            return
        if healthy:
            run.operation.state = OperationState.SUCCEEDED
            await self._execution.finish(runtime, run, None)
            return
        runtime.recovering = run.final = True
        runtime.ready.clear()
        try:
            await self._recover(runtime, run)
        finally:
            runtime.recovering = False
            runtime.ready.set()

    async def _leave(self, runtime: ModelRuntime) -> None:
        """One that the coordinator before this had accepted, and not begun: the model is as any other at a start."""
        if runtime.ports:
            await self._settle(runtime)
        self._bring_up(runtime)

    def _refusal(self, runtime: ModelRuntime, run: Run, healthy: bool) -> Refusal | None:
        wanted, state = run.request.to, runtime.state()
        if not healthy:
            return stale_weights(runtime.published, run.request.accept_stale_weights)
        if wanted is not None and wanted is not state:
            what = "sleep" if wanted is ModelState.ASLEEP else "wake"
            return Refusal(
                RejectCode.WRONG_STATE, f"{run.request.model!r} is {state}, not failed; {what} it instead"
            )
        return None

    async def _recover(self, runtime: ModelRuntime, run: Run) -> None:
        operation, model = run.operation, runtime.config
        parked = to_park(runtime.published, run.request.to, model)
        operation.lost_bytes = _lost(runtime, model)
        operation.prefix_tokens_lost = max((s.prefix_tokens for s in runtime.statuses.values()), default=0)
        try:
            await self._replace(runtime, run, parked)
        except Exception as error:
            log.exception("model %s was not recovered", model.name)
            reason = _why(error, self._deadlines)
            with contextlib.suppress(Exception):  # whatever kept it from being made is what people need
                await self._maker.end(model)
                runtime.ports = ()
            runtime.published = runtime.published.changed(failed=f"not recovered: {reason}")
            await self._settle(runtime)  # what was begun on the ranks before ends with them
        else:
            # Of the source, whatever had been pushed since.
            runtime.published = runtime.published.changed(failed="", weights_version=0)
            await self._settle(runtime)
            await runtime.ready.wait()  # a rank that is silent now is given up in the end
        failed = runtime.published.failed
        operation.ranks = _records(runtime)
        operation.state = OperationState.FAILED if failed else OperationState.SUCCEEDED
        operation.code, operation.reason = (RejectCode.RANK_FAILED, failed) if failed else (None, None)
        await self._execution.finish(runtime, run, runtime.published)

    async def _replace(self, runtime: ModelRuntime, run: Run, parked: Mapping[str, RestoreMode]) -> None:
        model = runtime.config
        self._execution.record_phase(run, Phase.END)
        async with runtime.settling:
            pass  # what is being settled with the old ranks has its outcome before the new ones have theirs
        await self._maker.end(model)
        runtime.ports, runtime.statuses = (), {}
        self._execution.record_phase(run, Phase.LOAD)
        ports = await self._loading.make_and_load(
            runtime, lambda: self._maker.make(model, self._execution.epoch, parked)
        )
        runtime.ports = sorted(ports, key=lambda port: port.rank)


def to_park(
    published: Published, wanted: ModelState | None = None, model: ModelConfig | None = None
) -> dict[str, RestoreMode]:
    """Tags that are to be asleep when the model is there again, with the mode of each."""
    if wanted is ModelState.AWAKE:
        return {}
    defaults = dict(model.restore_modes) if model is not None else {}
    tags = published.parked_tags
    if wanted is ModelState.ASLEEP and not tags:
        tags = published.tags or tuple(sorted(defaults))
    modes = {tag: RestoreMode(mode) for tag, mode in published.modes.items()}
    return {tag: modes.get(tag, defaults.get(tag, RestoreMode.PINNED)) for tag in tags}


def stale_weights(published: Published, accepted: bool) -> Refusal | None:
    """Nobody is served with older weights than those that were published, unless that is wanted."""
    if published.weights_version == 0 or accepted:
        return None
    why = (
        f"the weights of {published.model!r} were updated (version {published.weights_version}) and are lost"
    )
    return Refusal(
        RejectCode.STALE_WEIGHTS, f"{why}; recover with accept_stale_weights, then update them again"
    )


def _lost(runtime: ModelRuntime, model: ModelConfig) -> dict[str, int]:
    """Bytes by tag that were kept asleep and that no source has; as far as ranks have told of them."""
    lost: dict[str, int] = {}
    for status in runtime.statuses.values():
        for row in status.memory:
            size = int(str(row.get("host_bytes", 0))) + int(str(row.get("disk_bytes", 0)))
            if row.get("parked") and size and row["tag"] != "weights":
                lost[str(row["tag"])] = lost.get(str(row["tag"]), 0) + size
    return lost


def _records(runtime: ModelRuntime) -> list[RankRecord]:
    failed = bool(runtime.published.failed)
    records = []
    for port in range(runtime.config.tensor_parallel):
        status = runtime.statuses.get(port)
        outcome = RankOutcome.FAILED if failed or status is None else RankOutcome.COMMITTED
        record = RankRecord(port, outcome=outcome)
        if status is not None:
            record.node, record.device, record.reason = status.node, status.device_id, status.error or None
        records.append(record)
    return records


def _why(error: Exception, deadlines: Deadlines) -> str:
    if isinstance(error, TimeoutError):
        return str(error) or f"not loaded within {deadlines.load_s:g} s; raise deadlines.load_s"
    if isinstance(error, NoDeviceMemory):
        return str(error)
    return f"{type(error).__name__}: {error}"
