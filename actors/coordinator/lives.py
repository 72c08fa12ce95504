"""How models come, go and come back: what a coordinator does that can make and end ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from torpor.actors.config import ClusterConfig
from torpor.actors.coordinator.bringing_up import BringUp
from torpor.actors.coordinator.execution import Execution
from torpor.actors.coordinator.journal import Journal, JournalError
from torpor.actors.coordinator.loading import Loading
from torpor.actors.coordinator.recovery import Recovery
from torpor.actors.coordinator.removal import Removal
from torpor.actors.coordinator.runtime import ModelRuntime, Run
from torpor.actors.coordinator.watch import Watch
from torpor.actors.messages import Kind, Operation, OperationRequest, Origin
from torpor.actors.ports import RankMaker, RankPort

Way = Callable[[ModelRuntime, Run], Awaitable[None]]


class Lives:
    """Everything here is the coordinator's own; it hands in what it does with the rest of its state."""

    def __init__(
        self,
        config: ClusterConfig,
        journal: Journal,
        execution: Execution,
        maker: RankMaker,
        models: dict[str, ModelRuntime],
        *,
        attach: Callable[[str, Sequence[RankPort]], Awaitable[None]],
        fail: Callable[[str, str], Awaitable[None]],
        settle: Callable[[ModelRuntime], Awaitable[None]],
        submit: Callable[[OperationRequest], Awaitable[Operation]],
    ) -> None:
        self._journal = journal
        self._maker = maker
        self._models = models
        self._submit = submit
        self._settle = settle
        self._fail = fail
        deadlines = config.deadlines
        loading = Loading(maker, execution.room, deadlines)
        self._bring_up = BringUp(maker, loading, deadlines, lambda: execution.epoch, attach, self._not_up)
        recovery = Recovery(execution, maker, loading, deadlines, settle, self._bring_up.begin)
        removal = Removal(execution, maker, deadlines, self._bring_up.stop, self._forget)
        self.ways: Mapping[Kind, Way] = {Kind.RECOVER: recovery.run, Kind.DELETE: removal.run}
        self._watch = Watch(models, maker, fail, self._recover)
        self._watching: asyncio.Task[None] | None = None

    async def find(self) -> dict[str, Sequence[RankPort]]:
        """Ranks that live already, by model."""
        found = {name: await self._maker.find(runtime.config) for name, runtime in self._models.items()}
        return {name: ports for name, ports in found.items() if ports is not None}

    def start(self) -> None:
        """Bring up all models that nothing else is being done to."""
        for runtime in self._models.values():
            if not any(run.resumed for run in runtime.queue):
                self._bring_up.begin(runtime)
        self._watching = asyncio.create_task(self._watch.run())

    def begin(self, runtime: ModelRuntime) -> None:
        """A model is new."""
        self._bring_up.begin(runtime)

    async def close(self) -> None:
        await self._bring_up.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def end_all(self) -> None:
        """End the ranks of every model, each within its time; nothing is said of those that stay."""
        models = [runtime.config for runtime in self._models.values()]
        await asyncio.gather(*(self._maker.end(model) for model in models), return_exceptions=True)

    async def _recover(self, model: str) -> None:
        await self._submit(OperationRequest(Kind.RECOVER, model, origin=Origin.FAILURE))

    async def _forget(self, runtime: ModelRuntime, run: Run) -> None:
        """The last thing of a delete: from here on nobody knows the model."""
        runtime.ports = ()
        await self._settle(runtime)  # what else was begun on its ranks ends with them
        if runtime.doubt:
            raise JournalError(runtime.doubt)
        await self._journal.finish_deletion(run.operation)
        runtime.deleted = True
        runtime.ready.set()  # who waits for it is told so
        self._models.pop(runtime.config.name, None)

    async def _not_up(self, model: str, why: str) -> None:
        """Nobody is there to settle with what a coordinator before this one has begun: it ends here."""
        await self._fail(model, why)
        runtime = self._models.get(model)
        if runtime is not None and not runtime.ports:
            await self._settle(runtime)


def is_left_to_us(request: OperationRequest, decided: bool) -> bool:
    """Whether an operation that a coordinator before this has begun goes on (else it is settled with the ranks)."""
    return request.kind is Kind.RECOVER or (request.kind is Kind.DELETE and decided)
