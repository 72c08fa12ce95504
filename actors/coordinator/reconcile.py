"""Settles what a coordinator before this one, or a time-out, has left open on a model's ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torpor.actors.config import ClusterConfig
from torpor.actors.coordinator.execution import Execution
from torpor.actors.coordinator.journal import Journal, JournalError
from torpor.actors.coordinator.judge import Judgement, disagreement, in_doubt, judge
from torpor.actors.coordinator.records import parked_modes
from torpor.actors.coordinator.runtime import ModelRuntime, Run
from torpor.actors.coordinator.steps import RELOAD, Step
from torpor.actors.messages import (
    GateReason,
    Kind,
    Operation,
    OperationRequest,
    OperationState,
    RankStatus,
    RejectCode,
)
from torpor.actors.ports import RankPort, RankUnreachable

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Survey:
    """Who answered, who is gone for good, who has not loaded yet, and who has said nothing."""

    there: dict[int, RankStatus] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    loading: dict[int, str] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)

    @property
    def open_questions(self) -> str:
        return "; ".join((*self.loading.values(), *self.silent.values()))

    def give_up(self) -> None:
        """Nobody is waited for any longer: operations must end, too."""
        for rank, why in (*self.loading.items(), *self.silent.items()):
            self.gone[rank] = why
        self.loading, self.silent = {}, {}


class Reconciler:
    """Brings a model from whatever is found to one of: ready, failed, or in doubt (to be tried again)."""

    def __init__(
        self, config: ClusterConfig, journal: Journal, execution: Execution, now: Callable[[], float]
    ) -> None:
        self._config = config
        self._journal = journal
        self._execution = execution
        self._now = now

    async def settle(self, runtime: ModelRuntime) -> list[Operation]:
        """The operations that this has ended. Sets runtime.ready, or runtime.doubt, or published.failed.

        Past a bound, a rank that does not answer counts as gone. What cannot be written leaves the model in doubt.
        """
        finished: list[Operation] = []
        async with runtime.settling:
            ports = None
            try:
                while ports is not runtime.ports:  # a recovery may replace who was asked
                    ports = runtime.ports
                    given_up = runtime.recovering and runtime.published.failed
                    if given_up or not ports:
                        await self._end_open(runtime, finished)
                    else:
                        await self._settle(runtime, finished)
            except JournalError as error:
                runtime.doubt = str(error)
        return finished

    async def _settle(self, runtime: ModelRuntime, finished: list[Operation]) -> None:
        runtime.ready.clear()
        ports = runtime.ports
        survey = await self._survey(runtime)
        highest = max((status.epoch for status in survey.there.values()), default=0)
        if highest > self._execution.epoch:
            # Told by a rank that was silent when this coordinator took its epoch.
            await self._execution.raise_epoch(highest)
            survey = await self._survey(runtime)
        if not survey.open_questions:
            await self._settle_operations(runtime, survey, finished)
            survey = await self._survey(runtime)
        if runtime.ports is not ports:
            return
        if not survey.open_questions:
            await self._publish(runtime, survey)
            runtime.ready.set()
        runtime.doubt = survey.open_questions

    async def _survey(self, runtime: ModelRuntime) -> _Survey:
        survey = _Survey()
        deadlines = self._config.deadlines
        timeout_s = deadlines.preflight_s

        async def ask(rank: int, port: RankPort) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    status = await port.status(self._execution.epoch)
            except RankUnreachable as error:
                survey.gone[rank] = f"rank {rank} is gone: {error}"
            except TimeoutError:
                survey.silent[rank] = f"rank {rank} did not answer within {timeout_s:g} s"
            except Exception as error:
                survey.silent[rank] = f"rank {rank} told no status: {type(error).__name__}: {error}"
            else:
                if status.loaded:
                    survey.there[rank] = runtime.statuses[rank] = status
                elif status.error:
                    survey.silent[rank] = f"rank {rank} is not loaded: {status.error}"
                else:
                    survey.loading[rank] = f"rank {rank} is not loaded yet"

        # Of now: a recovery may take them away before the first of them is asked.
        await asyncio.gather(*(ask(rank, port) for rank, port in enumerate(runtime.ports)))
        patience_s = deadlines.load_s if survey.loading else deadlines.stage_s + deadlines.commit_s
        now_s = asyncio.get_running_loop().time()
        if runtime.silent_since_s is None:
            runtime.silent_since_s = now_s if survey.open_questions else None
        elif now_s - runtime.silent_since_s > patience_s:
            survey.give_up()
        return survey

    async def _settle_operations(
        self, runtime: ModelRuntime, survey: _Survey, finished: list[Operation]
    ) -> None:
        """Of the ranks that were asked; once a recovery replaces them there is nothing of theirs to settle."""
        ports = runtime.ports
        known = await self._left_open(runtime)
        ids = {operation.id for operation, _, _ in known} | runtime.accepted()
        for stray in in_doubt(survey.there):
            if stray not in ids:
                known.append(await self._stray(runtime, stray, survey))
        runtime.ending |= {one.id for one, _, _ in known if one.state is OperationState.RUNNING}
        for operation, request, decided in known:
            # One that was called failed keeps its record: people were told so, and why.
            told = operation.state is not OperationState.RUNNING
            forward = judge(operation.id, decided, survey.there) is Judgement.FORWARD
            if decided and not forward and not told:
                await self._end_failed(operation, "it was decided, and no rank that is there has it")
                told = True
            run = Run(replace(operation, phases=[], ranks=[]) if told else operation, request)
            if forward and not decided:
                await self._journal.decide(operation.id)
            if runtime.ports is not ports:
                break
            if not forward and not told:
                operation.code = RejectCode.CANCELLED
                operation.reason = (
                    "the coordinator restarted before the decision; nothing was changed, ask again"
                )
            begin = Step.COMMIT if forward else Step.ABORT
            await self._execution.drive(runtime, run, begin, list(survey.there.values()), told)
            finished.append(operation)

    async def _end_open(self, runtime: ModelRuntime, finished: list[Operation]) -> None:
        """There are no ranks to ask, and those that had it are gone."""
        for operation, _, _ in await self._left_open(runtime):
            await self._end_failed(operation, "its ranks are gone")
            finished.append(operation)
        runtime.doubt = ""

    async def _end_failed(self, operation: Operation, why: str) -> None:
        """`Nothing was changed` may be wrong, whatever the model is like by now."""
        operation.state, operation.code = OperationState.FAILED, RejectCode.RANK_FAILED
        operation.reason = f"{why}, so that nobody can go on with it; see how the model is, then ask anew"
        await self._end(operation)

    async def end_orphan(self, operation: Operation, decided: bool) -> None:
        """A coordinator before this has left it open, and there is no such model any more."""
        if decided:
            await self._end_failed(operation, f"{operation.model!r} is gone")
            return
        operation.state, operation.code = OperationState.REJECTED, RejectCode.UNKNOWN_MODEL
        operation.reason = f"{operation.model!r} is gone by now; nothing was changed"
        await self._end(operation)

    async def _end(self, operation: Operation) -> None:
        operation.finished_at = self._now()
        await self._execution.writer.finish(operation)

    async def _left_open(self, runtime: ModelRuntime) -> list[tuple[Operation, OperationRequest, bool]]:
        """By a coordinator before this one; what was accepted since waits for the end of those.

        Requests come, and operations end, while the journal is read.
        """
        ours = runtime.accepted()
        unfinished = await self._journal.unfinished()
        ours |= runtime.accepted()
        return [
            (operation, request, decided)
            for operation, request, decided in unfinished
            if operation.model == runtime.config.name
            and operation.id not in ours
            and not self._execution.writer.knows_end_of(operation.id)
        ]

    async def _stray(
        self, runtime: ModelRuntime, operation_id: str, survey: _Survey
    ) -> tuple[Operation, OperationRequest, bool]:
        """An operation that ranks hold and the journal does not know as running: lost, or ended as failed."""
        kinds = [
            found.staging_kind if found.staging == operation_id else found.kind
            for found in survey.there.values()
            if operation_id in (found.staging, found.operation)
        ]
        decided = await self._journal.is_decided(operation_id)
        if any(found.gate_reason is GateReason.WAKING for found in survey.there.values()):
            kinds.append(Kind.WAKE)  # known by nothing but the leader's gate
        kind = next((kind for kind in kinds if kind is not None), Kind.SLEEP)
        request = OperationRequest(kind, runtime.config.name)
        operation = await self._journal.operation(operation_id)
        if operation is None:
            operation = Operation(
                operation_id,
                kind,
                runtime.config.name,
                OperationState.RUNNING,
                [],
                {},
                created_at=self._now(),
            )
            await self._journal.begin(operation, request, self._now())
        return operation, request, decided

    async def _publish(self, runtime: ModelRuntime, survey: _Survey) -> None:
        broken = {
            rank: f"rank {rank}: {status.error}" for rank, status in survey.there.items() if status.error
        }
        failed = "; ".join((survey.gone | broken).values()) or disagreement(survey.there)
        if not failed and any(status.gate_reason is GateReason.FAILED for status in survey.there.values()):
            # All are there again, but the leader was told that one was lost, and lets nobody in any more.
            failed = runtime.published.failed or f"the leader has closed its gate for good; {RELOAD}"
        stuck = in_doubt(survey.there)
        if stuck and not failed:
            failed = f"operation {', '.join(stuck)} could not be ended on every rank"
        old = runtime.published
        if failed:
            new = old.changed(failed=failed)
        else:
            parked = survey.there[0].parked_tags
            new = old.changed(
                tags=tuple(sorted({tag for status in survey.there.values() for tag in status.tags})),
                parked_tags=tuple(sorted(parked)),
                undefined_tags=tuple(
                    sorted({t for status in survey.there.values() for t in status.undefined_tags})
                ),
                holds=old.holds if parked else (),
                modes=parked_modes(survey.there.values()),
                weights_version=survey.there[0].weights_version,
                paused=survey.there[0].paused,
                failed="",
            )
        runtime.published = new
        if new != old:
            await self._execution.writer.publish(runtime)
