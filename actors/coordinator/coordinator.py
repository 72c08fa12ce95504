"""The coordinator: takes requests, runs one operation a model at a time, and tells what became of it.

Plain asyncio; it knows neither Ray nor HTTP. State that must outlive it is in the journal.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from torpor.actors.audit import AuditEntry
from torpor.actors.config import ClusterConfig, ModelConfig
from torpor.actors.coordinator.ahead import Ahead
from torpor.actors.coordinator.asking import ask_status, trim_ranks
from torpor.actors.coordinator.care import Care
from torpor.actors.coordinator.execution import Execution
from torpor.actors.coordinator.feed import Feed
from torpor.actors.coordinator.journal import Journal
from torpor.actors.coordinator.lives import Lives, is_left_to_us
from torpor.actors.coordinator.reception import Reception
from torpor.actors.coordinator.reconcile import Reconciler
from torpor.actors.coordinator.records import Published
from torpor.actors.coordinator.register import Register
from torpor.actors.coordinator.roster import Roster
from torpor.actors.coordinator.runtime import ModelRuntime, Run
from torpor.actors.coordinator.settling import Settling
from torpor.actors.coordinator.watching import watch
from torpor.actors.coordinator.writer import Writer
from torpor.actors.messages import (
    Hold,
    Kind,
    ModelState,
    ModelView,
    Operation,
    OperationRequest,
    Trimmed,
)
from torpor.actors.news import Changes, Position
from torpor.actors.ports import RankMaker, RankPort


def new_operation_id() -> str:
    return f"op-{uuid.uuid4().hex}"


class Coordinator:
    """Implements ports.Control. Life: construct, `attach` the ranks that live already, `start`, attach more.

    maker: makes and ends ranks; without one, nothing but `attach` brings any, and no model is recovered or deleted.
    now: Unix time. host_limit_bytes: what ranks of a node may keep (budget.host_limit_bytes).
    """

    def __init__(
        self,
        config: ClusterConfig,
        journal: Journal,
        *,
        host_limit_bytes: int,
        now: Callable[[], float] = time.time,
        new_id: Callable[[], str] = new_operation_id,
        maker: RankMaker | None = None,
    ) -> None:
        self.config = config
        self.feed = Feed()
        self._journal = journal
        self._now = now
        self._models = {model.name: ModelRuntime(model, Published(model.name)) for model in config.models}
        self._register = Register(journal, self._models)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer = Writer(journal, self._spawn)
        self._care = Care(
            self._models,
            self._writer,
            self.feed,
            now,
            status=ask_status,
            carry_out=self._carry_out_now,
            spawn=self._spawn,
            ready=lambda runtime: self._ahead.look(runtime),
        )
        self._execution = Execution(
            config, journal, self._writer, self._models, self.feed, host_limit_bytes, now, self._care.room
        )
        self._ahead = Ahead(config, self._execution.claims, self._models, self._spawn)
        reconciler = Reconciler(config, journal, self._execution, now)
        self._settling = Settling(
            reconciler, self._care, self.feed, remember=self._register.remember, spawn=self._spawn
        )
        self._lives = (
            None
            if maker is None
            else Lives(
                config,
                journal,
                self._execution,
                maker,
                self._models,
                attach=self.attach,
                fail=self.fail,
                settle=self._settling.settle,
                submit=self.submit,
            )
        )
        submitting = asyncio.Lock()  # nothing comes or goes while a request is decided on
        self._roster = Roster(self._models, journal, self.feed, self._lives, submitting)
        self._reception = Reception(
            self._models,
            journal,
            self._register,
            submitting,
            now,
            new_id,
            makes_ranks=maker is not None,
            start=self._start,
        )

    @property
    def epoch(self) -> int:
        """0 before `start`. It rises later where a rank turns up that has seen a higher one."""
        return self._execution.epoch

    # --- life ---

    async def start(self) -> None:
        """A new epoch; then settle whatever the last coordinator left of the models attached so far.

        With a maker: ranks that live are found first, and models without any are brought up afterwards.
        """
        if self._lives:
            for name, ports in (await self._lives.find()).items():
                await self.attach(name, ports)
        # A journal that is new starts at 1 again, and the ranks would refuse all that this coordinator asks for.
        await self._execution.raise_epoch(await self._highest_epoch())
        self.feed.epoch = self.epoch
        for name, published in (await self._journal.published()).items():
            if name in self._models:
                self._models[name].published = published
        await self._resume()
        attached = [runtime for runtime in self._models.values() if runtime.ports and not runtime.queue]
        await asyncio.gather(*(self._settling.settle(runtime) for runtime in attached))
        if self._lives:
            self._lives.start()

    async def _resume(self) -> None:
        """Recoveries and deletions that the last coordinator has begun go on, before anything else is done."""
        for operation, request, decided in await self._journal.unfinished():
            runtime = self._models.get(operation.model)
            if runtime is None:
                await self._settling.end_orphan(operation, decided)
            elif not self._lives:
                continue
            elif runtime.deleting:
                self._start(runtime, Run(operation, request))  # to be told that there is no model any more
            elif is_left_to_us(request, decided):
                runtime.recovering = request.kind is Kind.RECOVER
                runtime.deleting = not runtime.recovering
                operation.phases = []
                self._start(runtime, Run(operation, request, resumed=True))

    async def attach(self, model: str, ports: Sequence[RankPort]) -> None:
        """These ranks are the model now. KeyError when it is not configured."""
        runtime = self._models[model]
        if len(ports) != runtime.config.tensor_parallel:
            raise ValueError(f"{model!r} has {runtime.config.tensor_parallel} ranks, {len(ports)} were given")
        runtime.ports = sorted(ports, key=lambda port: port.rank)
        if self.epoch:
            await self._settling.settle(runtime)

    async def _highest_epoch(self) -> int:
        """That any attached rank has seen; who does not answer now is asked again when its model is settled."""
        asked = [ask_status(runtime, port) for runtime in self._models.values() for port in runtime.ports]
        return max((status.epoch for status in await asyncio.gather(*asked)), default=0)

    async def fail(self, model: str, reason: str) -> None:
        """Something outside has seen that this model cannot serve, e.g. that its loading failed."""
        runtime = self._models.get(model)
        if runtime is None:
            return  # it was deleted meanwhile
        runtime.published = runtime.published.changed(failed=reason)
        runtime.ready.set()  # who waits for it need not wait any longer
        self.feed.add(model=runtime.view())
        await self._writer.publish(runtime)

    async def close(self) -> None:
        """Stop at once, wherever operations are. The next coordinator on this journal goes on with them."""
        self._care.leases.close()
        if self._lives:
            await self._lives.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end_service(self) -> None:
        """Stop, end all ranks, and leave nothing asleep: the next service begins as its configuration says."""
        await self.close()
        if self._lives:
            await self._lives.end_all()
        for runtime in self._models.values():
            await self._journal.publish(runtime.published.awake_again())

    async def create(self, model: ModelConfig) -> ModelView:
        return await self._roster.create(model)

    async def adapt(self, model: ModelConfig) -> ModelView:
        view = await self._roster.adapt(model)
        self._care.look(self._models[model.name])
        return view

    # --- requests ---

    async def submit(self, request: OperationRequest) -> Operation:
        """Start, join or refuse. Raises KeyReused."""
        return await self._reception.submit(request)

    def _start(self, runtime: ModelRuntime, run: Run) -> None:
        self._register.begin(run)
        runtime.queue.append(run)
        if runtime.running is run:
            run.turn.set()
        self.feed.add(operation=run.operation)
        self._spawn(self._carry_out(runtime, run))

    async def _carry_out(self, runtime: ModelRuntime, run: Run) -> None:
        ways = self._lives.ways if self._lives else {}
        await ways.get(run.request.kind, self._execution.run)(runtime, run)
        runtime.queue.remove(run)
        if runtime.queue:
            runtime.queue[0].turn.set()
        self._register.end(run)
        self._care.look(runtime)
        if runtime.deleted:
            self.feed.add(operation=run.operation, deleted=runtime.config.name)
        else:
            self.feed.add(operation=run.operation, model=runtime.view())
        self._settling.look(runtime)

    async def _carry_out_now(self, request: OperationRequest) -> Operation:
        """One of the coordinator's own, to its end."""
        return await self.wait((await self.submit(request)).id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- questions ---

    async def wait(self, operation_id: str, timeout_s: float | None = None) -> Operation:
        return await self._register.wait(operation_id, timeout_s)

    async def operation(self, operation_id: str) -> Operation:
        return await self._register.operation(operation_id)

    async def operations(self, model: str | None = None, limit: int = 100) -> list[Operation]:
        return await self._register.operations(model, limit)

    async def cancel(self, operation_id: str) -> bool:
        run = self._register.running(operation_id)
        if run is None:
            await self.operation(operation_id)  # KeyError for an unknown one
            return False
        if run.driver is not None:
            return run.driver.cancel()
        if run.final:
            return False
        run.cancelled = True
        run.turn.set()
        return True

    async def watch(self, name: str, seen: ModelView | None, timeout_s: float) -> ModelView:
        return await watch(lambda: self._known(name).view(), seen, timeout_s, self.feed)

    def _known(self, name: str) -> ModelRuntime:
        runtime = self._models.get(name)
        if runtime is None:
            raise KeyError(f"no model {name!r}")
        return runtime

    async def renew(self, operation_id: str) -> Hold:
        await self.operation(operation_id)  # KeyError for an unknown one
        return self._care.leases.renew(operation_id)

    async def models(self, detail: bool = False) -> list[ModelView]:
        if detail:
            return list(await asyncio.gather(*(self.model(name) for name in self._models)))
        return [runtime.view() for runtime in self._models.values()]

    async def model(self, name: str) -> ModelView:
        runtime = self._known(name)
        seen = runtime.ports or runtime.coming
        statuses = await asyncio.gather(*(ask_status(runtime, port) for port in seen))
        return runtime.view(statuses)

    async def trim(self, name: str, target_bytes: int) -> list[Trimmed]:
        return await trim_ranks(self._known(name), target_bytes)

    async def describe(self) -> ClusterConfig:
        return replace(self.config, models=tuple(runtime.config for runtime in self._models.values()))

    def published_state(self, model: str) -> ModelState:
        """As `models` tells it. KeyError when there is no such model."""
        return self._models[model].state()

    def reserved_bytes(self) -> int:
        """Promised to running operations, over all nodes and devices; 0 when none runs."""
        return self._execution.claims.budget.reserved_bytes()

    async def audit(self, entry: AuditEntry) -> None:
        await self._journal.audit(entry)

    async def audits(self, limit: int = 100) -> list[AuditEntry]:
        return await self._journal.audits(limit)

    async def changes(self, after: Position | None, wait_s: float) -> Changes:
        return await self.feed.wait(after, wait_s)
