"""Who is killed when, and what must come of it, as a table; and the way to the moment of each kill (F25, M6).

The operation is one on the model "toy" with two ranks. "other" is a model beside it, on the same devices.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import ray

from ranks.torpors import ENGINE, Torpor, read, request, until
from torpor.actors.config import EngineConfig
from torpor.actors.messages import (
    GateReason,
    Kind,
    LedgerPhase,
    ModelState,
    Operation,
    OperationRequest,
    OperationState,
    RankStatus,
    TokenEvent,
)

SLOW = EngineConfig(kind="ranks.toys:make_slow_engine")  # ten tokens a second
DRAINED_TOKENS = 40
COORDINATOR_S = 30.0  # within this, a coordinator is back and has settled what its predecessor left
OPERATION_S = 20.0  # within this, the operation of a dead rank has ended
RECOVERED_S = 60.0  # within this, all ranks of a model are new ones and loaded


class Who(StrEnum):
    COORDINATOR = "coordinator"
    LEADER = "rank 0"
    FOLLOWER = "rank 1"


class When(StrEnum):
    PREFLIGHT = "preflight"
    DRAIN = "drain"
    STAGE = "stage, no decision"
    COMMIT = "commit, after the decision"
    PUBLISH = "between commit and publish"


@dataclass(frozen=True)
class Kill:
    """outcome: of the operation. state: of the model, at last. operation_s, state_s: by when, from the kill on."""

    who: Who
    kind: Kind
    when: When
    outcome: OperationState
    state: ModelState
    operation_s: float
    state_s: float

    def __str__(self) -> str:
        return f"{self.who} - {self.kind} - {self.when}"


def _coordinator(kind: Kind, when: When, outcome: OperationState, state: ModelState) -> Kill:
    return Kill(Who.COORDINATOR, kind, when, outcome, state, COORDINATOR_S, COORDINATOR_S)


def _rank(who: Who, kind: Kind, when: When) -> Kill:
    """All ranks are replaced, towards the state that was published last."""
    last = ModelState.AWAKE if kind is Kind.SLEEP else ModelState.ASLEEP
    return Kill(who, kind, when, OperationState.FAILED, last, OPERATION_S, RECOVERED_S)


_AS_BEFORE, _FORWARD = OperationState.REJECTED, OperationState.SUCCEEDED
TABLE = (
    _coordinator(Kind.SLEEP, When.PREFLIGHT, _AS_BEFORE, ModelState.AWAKE),
    _coordinator(Kind.SLEEP, When.DRAIN, _AS_BEFORE, ModelState.AWAKE),
    _coordinator(Kind.SLEEP, When.STAGE, _AS_BEFORE, ModelState.AWAKE),
    _coordinator(Kind.SLEEP, When.COMMIT, _FORWARD, ModelState.ASLEEP),
    _coordinator(Kind.SLEEP, When.PUBLISH, _FORWARD, ModelState.ASLEEP),
    _coordinator(Kind.WAKE, When.PREFLIGHT, _AS_BEFORE, ModelState.ASLEEP),
    _coordinator(Kind.WAKE, When.STAGE, _AS_BEFORE, ModelState.ASLEEP),
    _rank(Who.FOLLOWER, Kind.SLEEP, When.DRAIN),
    _rank(Who.FOLLOWER, Kind.SLEEP, When.STAGE),
    _rank(Who.FOLLOWER, Kind.SLEEP, When.COMMIT),
    _rank(Who.FOLLOWER, Kind.WAKE, When.STAGE),
    _rank(Who.LEADER, Kind.SLEEP, When.DRAIN),
    _rank(Who.LEADER, Kind.SLEEP, When.STAGE),
    _rank(Who.LEADER, Kind.SLEEP, When.COMMIT),
    _rank(Who.LEADER, Kind.WAKE, When.STAGE),
)

# Calls of the device that take long, so that the operation stays where it is until the kill.
_SLOW_CALLS: dict[tuple[Kind, When], dict[str, float]] = {
    (Kind.SLEEP, When.STAGE): {"create_host": 2.0, "copy": 2.0},
    (Kind.SLEEP, When.COMMIT): {"unmap_range": 2.0},
    (Kind.SLEEP, When.PUBLISH): {"unmap_range": 2.0},
    (Kind.WAKE, When.STAGE): {"map_range": 2.0},
}


class Scene:
    """A cluster with an operation under way, kept at the moment of the kill."""

    def __init__(self, torpor: Torpor, kill: Kill) -> None:
        self.torpor = torpor
        self.kill = kill
        self.drained: asyncio.Task[list[TokenEvent]] | None = None
        self._stopped: list[int] = []

    @staticmethod
    def slow_rank(kill: Kill) -> int:
        """Whose device is slow: who is to die in the middle, or the last for whom the coordinator waits."""
        return 0 if kill.who is Who.LEADER else 1

    @classmethod
    def faults(cls, kill: Kill) -> dict[int, dict[str, object]]:
        calls = _SLOW_CALLS.get((kill.kind, kill.when))
        return {cls.slow_rank(kill): {"delay": calls}} if calls else {}

    @staticmethod
    def engine(kill: Kill) -> EngineConfig:
        return SLOW if kill.when is When.DRAIN else ENGINE

    async def begin(self) -> Operation:
        """Returns once the operation is where the kill is to find it."""
        torpor, kill = self.torpor, self.kill
        if kill.kind is Kind.WAKE:
            assert (await torpor.sleep()).state is OperationState.SUCCEEDED
        if kill.when is When.DRAIN:
            self.drained = asyncio.create_task(read(torpor.cluster.inference, request(DRAINED_TOKENS)))
            await torpor.until(lambda view: view.ranks[0].live_sequences == 1, 10)
        if kill.when is When.PREFLIGHT:
            self._stop((await pids(torpor))[1])
        operation = await torpor.control.submit(OperationRequest(kill.kind, "toy"))
        assert operation.state is OperationState.RUNNING, operation
        await self._reach()
        return operation

    async def _reach(self) -> None:
        other = 1 - self.slow_rank(self.kill)
        match self.kill.when:
            case When.PREFLIGHT:
                await asyncio.sleep(0.5)  # its own call to rank 1 is not answered
            case When.DRAIN:
                await self._until(0, lambda status: status.gate_reason is GateReason.DRAINING)
            case When.STAGE:
                await self._until(other, lambda status: status.ledger_phase is LedgerPhase.STAGED)
                assert (await self._status(1 - other)).ledger_phase is LedgerPhase.IDLE, "too late"
            case When.COMMIT:
                await self._until(other, lambda status: status.ledger_phase is LedgerPhase.COMMITTED)
                assert (await self._status(1 - other)).ledger_phase is LedgerPhase.COMMITTING, "too late"
            case When.PUBLISH:
                # The decision is made once one has committed. Who stands still publishes nothing.
                await self._until(other, lambda status: status.ledger_phase is LedgerPhase.COMMITTED)
                self._stop(await coordinator_pid(self.torpor))
                await self._until(1 - other, lambda status: status.ledger_phase is LedgerPhase.COMMITTED)

    async def strike(self) -> None:
        if self.kill.who is Who.COORDINATOR:
            pid = await self._coordinator_to_kill()
        else:
            pid = (await pids(self.torpor))[self.slow_rank(self.kill)]
        os.kill(pid, signal.SIGKILL)
        for stopped in self._stopped:
            if stopped != pid:
                os.kill(stopped, signal.SIGCONT)

    async def _coordinator_to_kill(self) -> int:
        if self.kill.when is When.PUBLISH:
            (pid,) = self._stopped
            return pid
        return await coordinator_pid(self.torpor)

    def _stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._stopped.append(pid)

    async def _status(self, rank: int) -> RankStatus:
        status: RankStatus = await self.torpor.rank("toy", rank).status.remote()
        return status

    async def _until(self, rank: int, true_of: Callable[[RankStatus], bool]) -> None:
        await until(lambda: self._status(rank), true_of, 15)


async def pids(torpor: Torpor, model: str = "toy") -> list[int]:
    return [status.pid for status in (await torpor.control.model(model)).ranks]


async def coordinator_pid(torpor: Torpor) -> int:
    return int(await asyncio.to_thread(ray.get, torpor.coordinator().pid.remote(), timeout=60))
