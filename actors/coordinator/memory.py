"""Ranks that live in this process: real promises, memory that is only counted, scripted faults.

For tests of the coordinator and of everything that speaks to it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torpor.actors.config import ClusterConfig
from torpor.actors.coordinator.memory_ledger import MemoryDevice, MemoryLedger
from torpor.actors.coordinator.memory_script import Fault as Fault
from torpor.actors.coordinator.memory_script import Held as Held
from torpor.actors.coordinator.memory_script import MemoryGate as MemoryGate
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    GateReason,
    Kind,
    LedgerPhase,
    OperationRequest,
    PhaseCall,
    PhaseReply,
    RankStatus,
    Refusal,
    RejectCode,
)
from torpor.actors.ports import RankUnreachable

T = TypeVar("T")


_OTHER_DIGEST = (Fault.OTHER_DIGEST, Fault.LOSE_OTHER_DIGEST)
_NEVER_BEGUN = (Fault.REFUSE, Fault.RAISE, Fault.HANG, Fault.DIE)


@dataclass(eq=False)
class MemoryRank:
    """RankPort. `fault` scripts what goes wrong, `delay_s` how long a method takes, `hold` that it waits for a word;
    `on_call` sees calls."""

    model: str
    rank: int
    device: MemoryDevice
    ledger: MemoryLedger
    incarnation: str = "incarnation-1"
    node: str = "node-0"
    loaded: bool = True
    error: str = ""  # why it serves no more
    gate: MemoryGate = field(default_factory=MemoryGate)
    epoch: int = 0
    dead: bool = False
    delay_s: dict[str, float] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)  # by method
    on_call: Callable[[str, str, MemoryRank], None] | None = None  # ("before" or "after", method, rank)
    calls: list[str] = field(default_factory=list)
    _faults: dict[str, deque[Fault]] = field(default_factory=lambda: defaultdict(deque))
    staging: str | None = None  # the operation whose stage is delayed
    staged_digest: str = ""
    spare_host_bytes: int = 0
    prefill_bytes: int = 0
    _lease: asyncio.TimerHandle | None = None
    _running: set[asyncio.Task[object]] = field(default_factory=set)

    def fault(self, method: str, fault: Fault, times: int = 1) -> None:
        self._faults[method].extend([fault] * times)

    def hold(self, method: str) -> Held:
        """Calls of this method wait from now on, until they are let go."""
        self.held[method] = Held()
        return self.held[method]

    def die(self) -> None:
        """The process ends, and the kernel takes its memory."""
        self.dead = True
        self.gate.fail()
        self.ledger.drop_everything()

    async def status(self, epoch: int | None = None) -> RankStatus:
        def answer() -> RankStatus:
            self.epoch = max(self.epoch, epoch or 0)
            return self._status()

        return await self._answer("status", answer)

    async def trim(self, target_bytes: int) -> int:
        def answer() -> int:
            freed = max(0, self.spare_host_bytes - target_bytes)
            self.spare_host_bytes -= freed
            return freed

        return await self._answer("trim", answer)

    async def prefill(self, room_bytes: int, timeout_s: float, backups: bool, pool: bool) -> int:
        """Makes what prefill_bytes says, where it has room."""

        def answer() -> int:
            made = min(room_bytes, self.prefill_bytes - self.spare_host_bytes)
            self.spare_host_bytes += made
            return made

        return await self._answer("prefill", answer)

    async def preflight(self, call: PhaseCall, request: OperationRequest) -> PhaseReply:
        return await self._phase("preflight", call, lambda: self.ledger.preflight(call, request))

    async def drain(self, call: PhaseCall, spec: DrainSpec, timeout_s: float, lease_s: float) -> PhaseReply:
        if spec.mode is DrainMode.IF_IDLE and self.gate.running:
            still = Refusal(RejectCode.NOT_IDLE, f"{self.gate.running} requests run or wait; ask again later")
            return await self._phase("drain", call, lambda: self.ledger.refuse(still))
        if call.epoch >= self.epoch and self.ledger.phase is LedgerPhase.IDLE and not self.dead:
            self.gate.close(call.operation, GateReason.DRAINING)
            self._end_lease()
            self._lease = asyncio.get_running_loop().call_later(timeout_s + lease_s, self._lease_over, call)
        waited_s = 0.0
        while self._must_finish(spec) and waited_s < timeout_s and not self.dead:
            await asyncio.sleep(0.05)
            waited_s += 0.05
        return await self._phase("drain", call, lambda: self._drained(call, spec, timeout_s))

    async def stage(self, call: PhaseCall, timeout_s: float) -> PhaseReply:
        return await self._phase("stage", call, lambda: self._staged(call))

    async def commit(self, call: PhaseCall) -> PhaseReply:
        return await self._phase("commit", call, lambda: self._committed(call))

    async def abort(self, call: PhaseCall, lost: bool = False) -> PhaseReply:
        return await self._phase("abort", call, lambda: self._aborted(call, lost))

    async def publish(self, call: PhaseCall) -> PhaseReply:
        return await self._phase("publish", call, lambda: self._published(call))

    def _status(self) -> RankStatus:
        ledger = self.ledger
        return RankStatus(
            model=self.model,
            rank=self.rank,
            incarnation=self.incarnation,
            node=self.node,
            pid=1000 + self.rank,
            epoch=self.epoch,
            loaded=self.loaded,
            ledger_phase=ledger.phase,
            operation=ledger.operation,
            kind=ledger.kind,
            tags=tuple(sorted(ledger.sizes)),
            parked_tags=tuple(sorted(ledger.parked)),
            undefined_tags=tuple(sorted(ledger.undefined)),
            device_kind="memory",
            device_id=self.device.id,
            device_free_bytes=self.device.free_bytes,
            device_total_bytes=self.device.capacity_bytes,
            memory=ledger.memory(),
            host_idle_bytes=self.spare_host_bytes,
            gate_open=self.rank == 0 and self.gate.open,
            gate_reason=self.gate.reason if self.rank == 0 else None,
            live_sequences=self.gate.running,
            idle_s=0.0 if self.gate.running else asyncio.get_running_loop().time() - self.gate.quiet_since_s,
            frozen_requests=self.gate.running if self._rests() else 0,
            error=self.error,
            staging=self.staging,
            gate_operation=self.gate.holder if self.rank == 0 else None,
            weights_version=ledger.weights_version,
            paused=ledger.paused,
            staged_digest=self.staged_digest if ledger.phase is LedgerPhase.STAGED else "",
        )

    def _drained(self, call: PhaseCall, spec: DrainSpec, timeout_s: float) -> PhaseReply:
        if self._must_finish(spec):
            self.gate.put_back(call.operation)
            still = f"{self.gate.running} requests still ran after {timeout_s:g} s"
            why = f"{still}; drain with mode abort, or wait longer"
            return self.ledger.refuse(Refusal(RejectCode.DRAIN_TIMEOUT, why))
        if spec.mode is not DrainMode.ABORT:
            return self.ledger.accept()
        aborted, self.gate.running = self.gate.running, 0
        return replace(self.ledger.accept(), aborted_requests=aborted)

    def _must_finish(self, spec: DrainSpec) -> bool:
        return spec.mode is DrainMode.FINISH and self.gate.running > 0 and not self._rests()

    def _rests(self) -> bool:
        """Where something is parked nothing runs, nor where it is paused: what is inside was frozen."""
        return bool(self.ledger.parked) or self.ledger.paused

    def _lease_over(self, call: PhaseCall) -> None:
        if self.ledger.phase is LedgerPhase.IDLE and not self.dead:
            self.gate.put_back(call.operation)

    def _staged(self, call: PhaseCall) -> PhaseReply:
        reply = self.ledger.stage(call)
        if not reply.ok:
            self._keep_closed(call)
        else:
            kind = self.ledger.kind or Kind.WAKE
            reasons = {Kind.SLEEP: GateReason.SLEEPING, Kind.WAKE: GateReason.WAKING}
            self.gate.close(call.operation, reasons.get(kind, GateReason.DRAINING))
        return reply

    def _aborted(self, call: PhaseCall, lost: bool) -> PhaseReply:
        if lost:
            self.gate.fail()
        reply = self.ledger.abort(call)
        if self.staging == call.operation:
            self.staging = None  # stopped: it will find its plan gone
        if reply.ok:
            self.gate.put_back(call.operation)
        return reply

    def _published(self, call: PhaseCall) -> PhaseReply:
        reply = self.ledger.publish(call)
        if reply.ok:
            self._end_lease()
            self.gate.settle(self._closed())
        return reply

    def _committed(self, call: PhaseCall) -> PhaseReply:
        reply = self.ledger.commit(call)
        return replace(reply, stays_closed=reply.ok and self._closed() is not None)

    def _closed(self) -> GateReason | None:
        """Why nobody can be served, whatever operations there are."""
        if self.ledger.parked:
            return GateReason.ASLEEP
        if self.ledger.undefined:
            return GateReason.CONTENTS_UNDEFINED
        return GateReason.PAUSED if self.ledger.paused else None

    def _keep_closed(self, call: PhaseCall) -> None:
        """A stage that said no: the other ranks may have staged, so that only the coordinator may reopen."""
        if self.gate.holder == call.operation:
            self._end_lease()

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    async def _phase(self, method: str, call: PhaseCall, body: Callable[[], PhaseReply]) -> PhaseReply:
        def answer() -> PhaseReply:
            if method == "stage" and self.staging == call.operation:
                self.staging = None
            if call.epoch < self.epoch:
                reply = self.ledger.refuse(Refusal(RejectCode.REFUSED, f"epoch {call.epoch} is over"))
            elif fault is Fault.REFUSE:
                if method == "stage":
                    self._keep_closed(call)
                reply = self.ledger.refuse(
                    Refusal(RejectCode.REFUSED, f"rank {self.rank} refuses, as scripted")
                )
            else:
                self.epoch = call.epoch
                reply = body()
            epoch = call.epoch - 1 if fault is Fault.STALE else call.epoch
            digest = f"{reply.digest}!" if fault in _OTHER_DIGEST else reply.digest
            if method == "stage" and reply.ok and digest:
                self.staged_digest = digest
            return replace(
                reply,
                operation=call.operation,
                phase=call.phase,
                epoch=epoch,
                rank=self.rank,
                incarnation=self.incarnation,
                digest=digest,
                status=self._status() if method in ("preflight", "publish") else None,
            )

        fault = self._faults[method].popleft() if self._faults[method] else None
        if method == "stage" and fault not in _NEVER_BEGUN and call.epoch >= self.epoch:
            self.staging = call.operation
        return await self._answer(method, answer, fault)

    async def _answer(self, method: str, body: Callable[[], T], fault: Fault | None = None) -> T:
        """In a task of its own: a caller that goes away stops nothing."""
        if fault is None and method in ("status", "prefill") and self._faults[method]:
            fault = self._faults[method].popleft()
        task = asyncio.create_task(self._do(method, body, fault))
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also when the caller has gone

    async def _do(self, method: str, body: Callable[[], T], fault: Fault | None) -> T:
        self.calls.append(method)
        self._notify("before", method)
        if fault is Fault.DIE:
            self.die()
        self._must_live()  # who is dead is not slow
        if self.delay_s.get(method):
            await asyncio.sleep(self.delay_s[method])
        if method in self.held:
            await self.held[method].pass_by()
        self._must_live()
        if fault is Fault.RAISE:
            raise RuntimeError(f"rank {self.rank} raises in {method}, as scripted")
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        result = body()
        self._notify("after", method)
        if fault is Fault.DIE_AFTER:
            self.die()
        self._must_live()
        if fault in (Fault.LOSE, Fault.LOSE_OTHER_DIGEST):
            await asyncio.Event().wait()
        return result

    def _notify(self, moment: str, method: str) -> None:
        if self.on_call is not None:
            self.on_call(moment, method, self)

    def _must_live(self) -> None:
        if self.dead:
            raise RankUnreachable(f"rank {self.rank} of {self.model!r} is gone")


@dataclass
class MemoryCluster:
    """Ranks by model, on devices that they share as GPUs: rank r of a model is on device r mod count."""

    devices: list[MemoryDevice]
    ranks: dict[str, list[MemoryRank]]

    @staticmethod
    def build(config: ClusterConfig, tags: Mapping[str, int] | None = None) -> MemoryCluster:
        """tags: bytes by tag on each rank; None = weights 100 MiB, kv_cache 50 MiB."""
        sizes = dict(tags) if tags is not None else {"weights": 100 << 20, "kv_cache": 50 << 20}
        count = max([config.device.count, *(model.tensor_parallel for model in config.models)])
        devices = [MemoryDevice(f"memory:{i}", config.device.host_capacity_bytes) for i in range(count)]
        ranks: dict[str, list[MemoryRank]] = {}
        for model in config.models:
            ranks[model.name] = []
            for rank in range(model.tensor_parallel):
                ledger = MemoryLedger(f"{model.name}/{rank}", devices[rank], sizes, dict(model.restore_modes))
                ranks[model.name].append(MemoryRank(model.name, rank, devices[rank], ledger))
        return MemoryCluster(devices, ranks)
