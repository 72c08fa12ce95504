"""Carries an accepted operation out: its turn, its bytes, its devices, its decision, its outcome."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torpor.actors.config import ClusterConfig
from torpor.actors.coordinator.acceptance import changed_since, in_force
from torpor.actors.coordinator.budget import Place
from torpor.actors.coordinator.claims import Claims
from torpor.actors.coordinator.contents import contents_after, modes_after, paused_after, version_after
from torpor.actors.coordinator.driver import GRACE_S, Driver
from torpor.actors.coordinator.feed import Feed
from torpor.actors.coordinator.holds import holds_after, only_releases, without
from torpor.actors.coordinator.holds import refusal as held
from torpor.actors.coordinator.journal import Journal
from torpor.actors.coordinator.machine import Machine
from torpor.actors.coordinator.records import Published, fill, phase_bytes
from torpor.actors.coordinator.room import Room, may_make_room
from torpor.actors.coordinator.runtime import ModelRuntime, Run
from torpor.actors.coordinator.spare import Spare
from torpor.actors.coordinator.steps import PHASE_OF, RELOAD, Step
from torpor.actors.coordinator.writer import Writer
from torpor.actors.messages import (
    Kind,
    ModelState,
    OperationState,
    Phase,
    PhaseRecord,
    RankStatus,
    Refusal,
    RejectCode,
)

MAX_ATTEMPTS = 3  # of one operation for which room is made
log = logging.getLogger(__name__)


class Execution:
    """The way of an operation through its phases. claims: the cluster's bytes and device locks."""

    def __init__(
        self,
        config: ClusterConfig,
        journal: Journal,
        writer: Writer,
        models: Mapping[str, ModelRuntime],
        feed: Feed,
        host_limit_bytes: int,
        now: Callable[[], float],
        room: Room,
    ) -> None:
        self.epoch = 0
        self.claims = Claims(config.node, models, host_limit_bytes)
        self.writer = writer
        self._config = config
        self._journal = journal
        self._models = models
        self._feed = feed
        self._now = now
        self.room = room
        self._spare = Spare(models, self.claims)

    async def raise_epoch(self, above: int) -> None:
        """A new epoch, from the journal: higher than `above` and than every one before it."""
        self.epoch = max(self.epoch, await self._journal.next_epoch(above))

    async def run(self, runtime: ModelRuntime, run: Run) -> None:
        """From waiting for its turn to the journaled outcome."""
        refusal = await self.take_turn(runtime, run)
        if refusal is not None:
            await self.reject(runtime, run, refusal)
        elif only_releases(runtime.published, run.request):
            await self._release(runtime, run)
        else:
            await self.drive(runtime, run)

    async def _release(self, runtime: ModelRuntime, run: Run) -> None:
        """One hold ends, and nothing else: no rank is asked."""
        published = runtime.published
        left = without(published.holds, run.request.releases)
        run.operation.state = OperationState.SUCCEEDED
        changes = left != published.holds and not run.request.dry_run
        await self.finish(runtime, run, published.changed(holds=left) if changes else None)

    async def reject(self, runtime: ModelRuntime, run: Run, refusal: Refusal) -> None:
        """Its outcome: nothing was changed."""
        run.operation.state = OperationState.REJECTED
        run.operation.code, run.operation.reason = refusal.code, refusal.reason
        await self.finish(runtime, run, None)

    async def take_turn(self, runtime: ModelRuntime, run: Run) -> Refusal | None:
        """Until those before it have ended; a delete waits for no state, and a recover for any that is known."""
        kind = run.request.kind
        limit_s = run.request.timeout_s
        if limit_s is None:
            limit_s = self._config.deadlines.load_s
        try:
            async with asyncio.timeout(limit_s):
                await run.turn.wait()
                if not run.cancelled and kind is not Kind.DELETE:
                    await runtime.ready.wait()
        except TimeoutError:
            return Refusal(
                RejectCode.CONFLICT, f"its turn did not come within {limit_s:g} s; nothing was changed"
            )
        if run.cancelled:
            return Refusal(RejectCode.CANCELLED, "cancelled while it waited; nothing was changed")
        if runtime.deleted:
            return Refusal(RejectCode.UNKNOWN_MODEL, f"{run.request.model!r} was deleted while this waited")
        if runtime.state() is ModelState.FAILED and kind not in (Kind.RECOVER, Kind.DELETE):
            return Refusal(
                RejectCode.WRONG_STATE, f"{run.request.model!r} is failed: {runtime.published.failed}"
            )
        return changed_since(runtime, run.request) or held(runtime.published, run.request)

    async def drive(
        self,
        runtime: ModelRuntime,
        run: Run,
        begin: Step = Step.PREFLIGHT,
        statuses: Sequence[RankStatus] = (),
        told: bool = False,
    ) -> None:
        """The phases, from the first, or from where a coordinator before this one has left them.

        told: the operation has an outcome already, which stays as it was told.
        """
        used = False
        try:
            machine = await self._attempts(runtime, run, begin, statuses)
            fill(run.operation, machine)
            assert machine.verdict is not None
            run.operation.state = machine.verdict
            kept_before = self.claims.kept_bytes()
            published = self._outcome(runtime, run)
            succeeded = run.operation.state is OperationState.SUCCEEDED and not run.operation.dry_run
            used = succeeded and run.request.kind is not Kind.UPDATE  # which keeps nothing
            self.claims.give_back(machine, kept_before)
            if not told:
                await self.finish(runtime, run, published)
                return
            run.spans.end(run.operation)
            if published is not None:
                runtime.published = published
                await self.writer.publish(runtime)
        finally:
            self.claims.budget.release(run.operation.id, used)
            run.release_locks()

    async def _attempts(
        self, runtime: ModelRuntime, run: Run, begin: Step, statuses: Sequence[RankStatus]
    ) -> Machine:
        """To the end of the phases: once, and anew where ranks found no memory and room was made for them."""
        for left in reversed(range(MAX_ATTEMPTS)):
            machine = run.machine = Machine(
                run.operation.id, in_force(runtime, run.request), self.epoch, len(runtime.ports)
            )
            own = _OwnSteps(self, runtime, run)
            driver = run.driver = Driver(
                machine,
                runtime.ports,
                own,
                self._config.deadlines,
                lambda step: self._record_step(run, step),
                run.spans,
            )
            await driver.run(begin, statuses)
            rejected = machine.verdict is OperationState.REJECTED and machine.refusal is not None
            if not left or not rejected or not await self._make_room(runtime, run, machine):
                break
            self.claims.budget.release(run.operation.id, used=False)
            run.release_locks()
            begin, statuses = Step.PREFLIGHT, ()
        return machine

    def _record_step(self, run: Run, step: Step) -> None:
        phases = run.operation.phases
        name = PHASE_OF.get(step)
        if step in (Step.WITHDRAW, Step.ABORT, Step.REOPEN):
            name = phases[-1].name if phases else name  # undoing belongs to what it undoes
        self.record_phase(run, name)

    def record_phase(self, run: Run, name: Phase | None) -> None:
        """From now on the operation is in this phase; None = in none any more."""
        now_s = asyncio.get_running_loop().time()
        phases = run.operation.phases
        if phases and phases[-1].name is not name:
            phases[-1].seconds = now_s - run.phase_began_s
        if name is not None and (not phases or phases[-1].name is not name):
            phases.append(PhaseRecord(name, started_at=self._now()))
            run.spans.enter(phases[-1])
            run.phase_began_s = now_s
            runtime = self._models.get(run.request.model)
            if runtime is not None:
                self._feed.add(operation=run.operation, model=runtime.view())

    def _outcome(self, runtime: ModelRuntime, run: Run) -> Published | None:
        """What is to be published; None = as before."""
        machine, operation = run.machine, run.operation
        assert machine is not None
        for phase in operation.phases:
            phase.bytes = phase_bytes(machine, phase.name)
        if operation.state is OperationState.FAILED and not machine.decided and not machine.gathering.lost:
            # Silent is not lost: what is staged still may be taken back when the rank answers again.
            operation.reason = operation.reason or "not all ranks answered"
            operation.code = operation.code or RejectCode.RANK_FAILED
            runtime.doubt = f"{operation.kind} {operation.id}: {operation.reason}"
            runtime.ready.clear()
            return None
        if operation.state is OperationState.FAILED:
            reason = (
                f"{operation.kind} {operation.id} failed: {operation.reason or 'not all ranks committed'}"
            )
            operation.reason = operation.reason or f"not all ranks committed; {RELOAD}"
            operation.code = operation.code or RejectCode.RANK_FAILED
            return runtime.published.changed(failed=reason)
        if operation.state is OperationState.REJECTED or operation.dry_run:
            return None
        if not machine.noop:
            # As they have told with the end of their publish.
            runtime.statuses.update({slot.rank: slot.published for slot in machine.slots if slot.published})
        published = runtime.published  # who is called failed meanwhile stays so: its gate is closed for good
        parked, undefined = contents_after(runtime, run)
        holds = holds_after(published.holds, run.request, operation, bool(parked), self._now())
        tags = tuple(sorted({tag for status in runtime.statuses.values() for tag in status.tags}))
        return published.changed(
            tags=tags,
            parked_tags=parked,
            undefined_tags=undefined,
            weights_version=version_after(runtime, run),
            modes=modes_after(runtime, run, parked),
            paused=paused_after(runtime, run),
            holds=holds,
        )

    async def look(self, runtime: ModelRuntime) -> None:
        """Ask every rank how it is; who does not answer in time keeps the status that it had."""

        async def ask(rank: int) -> None:
            try:
                async with asyncio.timeout(GRACE_S):
                    runtime.statuses[rank] = await runtime.ports[rank].status()
            except Exception as error:
                log.warning("rank %d of %s told no status: %s", rank, runtime.config.name, error)

        await asyncio.gather(*(ask(rank) for rank in range(len(runtime.ports))))

    def end_record(self, run: Run) -> None:
        """The operation is over now, and its last phase with it."""
        run.operation.finished_at = self._now()
        if run.operation.phases:
            run.operation.phases[-1].seconds = asyncio.get_running_loop().time() - run.phase_began_s

    async def finish(self, runtime: ModelRuntime, run: Run, published: Published | None) -> None:
        """The outcome, and what is published with it; None = as before."""
        operation = run.operation
        self.end_record(run)
        run.spans.end(operation)
        if published is not None:
            runtime.published = published
            self.claims.held.look(runtime)
        await self.writer.finish(operation, runtime if published is not None else None)

    # --- the coordinator's own steps ---

    async def reserve(self, runtime: ModelRuntime, run: Run, machine: Machine) -> Refusal | None:
        """Nobody has noticed the operation yet, and it holds nothing: others may go to sleep for it here."""
        refusal = self.claims.reserve(runtime, run, machine)
        if refusal is not None and refusal.code is RejectCode.HOST_MEMORY:
            lacking = partial(self.claims.lacking_bytes, runtime, run, machine)
            if run.request.dry_run:  # takes nothing from anybody, and says what the operation would find
                return None if self._spare.covers(runtime, lacking()) else refusal
            await self._spare.give_back(runtime, lacking)
            refusal = self.claims.reserve(runtime, run, machine)
        if refusal is None or not await self._make_room(runtime, run, machine, refusal):
            return refusal
        return self.claims.reserve(runtime, run, machine)

    async def _make_room(
        self, runtime: ModelRuntime, run: Run, machine: Machine, refusal: Refusal | None = None
    ) -> bool:
        """After a refusal, the machine's or this: whether there is room now."""
        refusal = refusal or machine.refusal
        no_memory = refusal is not None and refusal.code is RejectCode.DEVICE_MEMORY
        if not no_memory or not may_make_room(run.request, runtime):
            return False

        async def lacking() -> dict[Place, int]:
            await self.look(runtime)
            for slot in machine.slots:
                slot.status = runtime.statuses.get(slot.rank, slot.status)
            lacking = self.claims.lacking_bytes(runtime, run, machine)
            return {place: size for place, size in lacking.items() if place.device}

        return await self.room.make(run.request.model, lacking)

    async def write_decision(self, run: Run) -> None:
        await self._journal.decide(run.operation.id)


class _OwnSteps:
    """driver.OwnSteps of one run."""

    def __init__(self, execution: Execution, runtime: ModelRuntime, run: Run) -> None:
        self._execution = execution
        self._runtime = runtime
        self._run = run

    async def reserve(self, machine: Machine) -> Refusal | None:
        return await self._execution.reserve(self._runtime, self._run, machine)

    async def take_locks(self, machine: Machine) -> Refusal | None:
        await self._execution.claims.take_locks(self._run, machine)
        return None

    async def write_decision(self, machine: Machine) -> Refusal | None:
        await self._execution.write_decision(self._run)
        return None
