"""What the coordinator holds of one model: its ports, its published state, and its queue of operations."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torpor.actors.config import ModelConfig
from torpor.actors.coordinator.budget import Place
from torpor.actors.coordinator.driver import Driver
from torpor.actors.coordinator.machine import Machine
from torpor.actors.coordinator.records import Published, makes_hold, rank_record, same_request
from torpor.actors.coordinator.spans import OperationSpans
from torpor.actors.coordinator.steps import Step
from torpor.actors.messages import (
    GateReason,
    Kind,
    LedgerPhase,
    ModelState,
    ModelView,
    OnConflict,
    Operation,
    OperationRequest,
    OperationState,
    RankStatus,
)
from torpor.actors.ports import RankPort

# From these on a model is on its way; before, nobody notices the operation.
_UNNOTICED = (Step.PREFLIGHT, Step.RESERVE, Step.WITHDRAW, Step.DONE)


def as_running(operation: Operation) -> Operation:
    return replace(operation, state=OperationState.RUNNING, finished_at=None)


@dataclass(eq=False)
class Run:
    """One operation from its acceptance to its outcome."""

    operation: Operation
    request: OperationRequest
    machine: Machine | None = None
    driver: Driver | None = None
    cancelled: bool = False
    final: bool = False  # it cannot be cancelled any more
    resumed: bool = False  # by a coordinator that found it begun
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    locks: list[asyncio.Lock] = field(default_factory=list)
    phase_began_s: float = 0.0
    spans: OperationSpans = field(init=False)

    def __post_init__(self) -> None:
        self.spans = OperationSpans(self.operation, self.request)

    def told(self) -> Operation:
        """The record as others may see it now: it runs until its end is written and the next one has its turn."""
        ranks = self.operation.ranks
        if not ranks and self.machine is not None:
            ranks = [rank_record(slot) for slot in self.machine.slots]
        return replace(as_running(self.operation), ranks=ranks)

    def release_locks(self) -> None:
        while self.locks:
            self.locks.pop().release()


@dataclass(eq=False)
class ModelRuntime:
    config: ModelConfig
    published: Published
    ports: Sequence[RankPort] = ()
    coming: Sequence[RankPort] = ()  # they load, and are not attached yet: to look at alone
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # no doubt left: awake, asleep or failed
    settling: asyncio.Lock = field(default_factory=asyncio.Lock)
    ending: set[str] = field(default_factory=set)  # left open, and not told as ended before it is settled
    doubt: str = ""  # why it is not ready though attached
    silent_since_s: float | None = None  # in the event loop's time: nothing was told by a rank
    statuses: dict[int, RankStatus] = field(default_factory=dict)  # the last known
    queue: deque[Run] = field(default_factory=deque)  # the first one has its turn
    accepting: str = ""  # an operation that is being written down, and is in the queue next
    recovering: bool = False  # its ranks are being replaced
    deleting: bool = False  # its gate is closed, to end
    deleted: bool = False

    @property
    def running(self) -> Run | None:
        return self.queue[0] if self.queue else None

    def accepted(self) -> set[str]:
        """Operations that are this coordinator's own, from before they are in the journal on."""
        return {run.operation.id for run in self.queue} | ({self.accepting} - {""})

    def bytes_by_place(self, column: str = "device_bytes", parked_only: bool = False) -> Counter[Place]:
        """What the model has at each device, as its ranks last told; column: of RankStatus.memory."""
        found: Counter[Place] = Counter()
        for status in self.statuses.values():
            found[Place.of(status)] += sum(
                int(str(row.get(column) or 0))
                for row in status.memory
                if row.get("parked") or not parked_only
            )
        return found

    def state(self) -> ModelState:
        if self.recovering:
            return ModelState.RECOVERING
        if self.published.failed:
            return ModelState.FAILED
        if not self.ready.is_set():
            # Attached for the first time it was never anything else: nothing of it is published yet.
            known = self.ports and (self.published.generation or self.doubt)
            return ModelState.RECOVERING if known else ModelState.LOADING
        on_its_way = self._on_its_way()
        if on_its_way is not None and on_its_way.moves_memory:
            return ModelState.SLEEPING if on_its_way is Kind.SLEEP else ModelState.WAKING
        return ModelState.ASLEEP if self.published.parked_tags else ModelState.AWAKE

    def _on_its_way(self) -> Kind | None:
        run = self.running
        if run is None or run.machine is None or run.machine.step in _UNNOTICED:
            return None
        return run.request.kind

    def _becomes_hold(self) -> bool:
        run = self.running
        return run is not None and self._on_its_way() is not None and makes_hold(run.request)

    def gate_reason(self) -> GateReason | None:
        """From what is published; None = open."""
        state = self.state()
        if self.deleting:
            return GateReason.DRAINING
        if state is ModelState.AWAKE:
            if self.published.undefined_tags:
                return GateReason.CONTENTS_UNDEFINED
            if self.published.paused:
                return GateReason.PAUSED
            return GateReason.DRAINING if self._on_its_way() else None
        run = self.running
        if (
            state is ModelState.SLEEPING
            and run
            and run.machine
            and run.machine.step in (Step.DRAIN, Step.LOCK)
        ):
            return GateReason.DRAINING
        if state is ModelState.RECOVERING and self.doubt and not self.recovering:
            return GateReason.IN_DOUBT
        return GateReason(state.value)

    def joinable(self, request: OperationRequest) -> Run | None:
        """The operation that does just what is asked for, when there is one to join.

        Who would wait comes after all that wait already, and so joins the last of them only.
        """
        if not self.queue:
            return None
        run = self.queue[-1] if request.on_conflict is OnConflict.WAIT else self.queue[0]
        recover = request.kind is Kind.RECOVER
        if run.request.origin.automatic and not request.origin.automatic and not recover:
            return None  # it may end for reasons that are none for whoever asks
        same = same_request(request, run.request, self.published.tags, self.config.restore_modes)
        return run if same and not run.cancelled else None

    def view(self, statuses: Sequence[RankStatus] = ()) -> ModelView:
        """With statuses, the gate is what the leader says of it."""
        reason = self.gate_reason()
        leader = next((status for status in statuses if status.rank == 0 and not status.error), None)
        unheard = self.recovering or self.state() in (ModelState.FAILED, ModelState.LOADING)
        if leader is not None and not unheard:
            reason = None if leader.gate_open else (leader.gate_reason or reason)
        run = self.running
        return ModelView(
            name=self.config.name,
            state=self.state(),
            gate_open=reason is None,
            gate_reason=reason,
            generation=self.published.generation,
            parked_tags=list(self.published.parked_tags),
            tags=list(self.published.tags),
            hold=self.published.hold or self._becomes_hold(),
            holds=list(self.published.holds),
            weights_version=self.published.version_there,
            tensor_parallel=self.config.tensor_parallel,
            operation=run.operation.id if run is not None else None,
            ranks=list(statuses),
            error=self.published.failed or self.doubt,
            paused=self.published.paused,
        )

    def unknown_status(self, rank: int, why: str) -> RankStatus:
        """What is shown of a rank that does not answer: the last that it said, and why it is old."""
        known = self.statuses.get(rank)
        return replace(known if known is not None else blank_status(self.config.name, rank), error=why)


def blank_status(model: str, rank: int) -> RankStatus:
    return RankStatus(
        model=model,
        rank=rank,
        incarnation="",
        node="",
        pid=0,
        epoch=0,
        loaded=False,
        ledger_phase=LedgerPhase.IDLE,
        operation=None,
        kind=None,
        tags=(),
        parked_tags=(),
        undefined_tags=(),
        device_kind="",
        device_id="",
        device_free_bytes=0,
        device_total_bytes=0,
    )
