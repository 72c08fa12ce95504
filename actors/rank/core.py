"""One rank as plain Python: a RankPort, and on rank 0 a LeaderPort, over a ledger, an engine and a gate.

Ray is at its edge only (actor.py). Nothing touches a device before `load`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from torpor.actors.config import RankSpec
from torpor.actors.engine.protocol import Engine
from torpor.actors.limits import host_limit_bytes
from torpor.actors.messages import (
    AbortOrder,
    Admission,
    AdmissionReply,
    DrainSpec,
    EngineChoices,
    GateReason,
    GenerateRequest,
    LedgerPhase,
    OperationRequest,
    PhaseCall,
    PhaseReply,
    RankStatus,
    Refusal,
    RejectCode,
    TokenEvent,
)
from torpor.actors.rank.device import arm_faults, make_device
from torpor.actors.rank.engines import make_engine
from torpor.actors.rank.front_ends import FrontEnds
from torpor.actors.rank.gate import Gate
from torpor.actors.rank.leader import Leader
from torpor.actors.rank.ledger import RankLedger
from torpor.actors.rank.machinery import Machinery
from torpor.actors.rank.phases import Phases
from torpor.actors.rank.spans import traced
from torpor.actors.rank.update import OpenHanded, Sources, nobody_hands_over
from torpor.native import Device, Ledger

TICK_S = 0.25
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a rank is made of; tests put other parts in."""

    make_device: Callable[[RankSpec], Device] = make_device
    make_ledger: Callable[..., RankLedger] = RankLedger
    make_engine: Callable[[RankSpec, Ledger, Device], Engine] = make_engine
    clock: Clock = time.monotonic
    open_handed: OpenHanded = nobody_hands_over


class RankCore:
    """`load` once, then the phases and, on the leader, requests. `close` at the end."""

    def __init__(self, spec: RankSpec, parts: Parts | None = None, node: str = "") -> None:
        self.rank = spec.rank
        self._spec = spec
        self._parts = parts or Parts()
        self._node = node
        self._host_limit_bytes = host_limit_bytes(None)
        self._device: Device | None = None
        self._machinery: Machinery | None = None
        self._phases: Phases | None = None
        self._leader = self._make_leader() if spec.rank == 0 else None
        self._error = ""
        self._loading: asyncio.Task[None] | None = None
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._watch_loop, name="torpor-watch", daemon=True)

    # --- life ---

    @property
    def device_id(self) -> str:
        """The device that this rank was told to take, or ""."""
        return self._spec.device_id

    async def load(self, process_group: str = "", step_channel: str = "", device_id: str = "") -> None:
        """Make device, ledger and engine, and open the gate. Asked again, it joins the first time.

        The addresses ("host:port", where tensor_parallel > 1) and the device override the spec's. Raises what went
        wrong, and `status` tells it too.
        """
        if self._loading is None:
            spec = self._spec
            self._spec = replace(
                spec,
                process_group=process_group or spec.process_group,
                step_channel=step_channel or spec.step_channel,
                device_id=device_id or spec.device_id,
            )
            self._loading = asyncio.create_task(self._load_once())
        await asyncio.shield(self._loading)

    async def _load_once(self) -> None:
        try:
            self._machinery = await asyncio.to_thread(self._load)
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            # What was made before it failed is held by the frames of its traceback, and this rank lives on.
            traceback.clear_frames(error.__traceback__)
            if self._leader is not None:
                self._leader.fail(self._error)
            raise
        spec = self._spec
        self._phases = Phases(self._machinery, self._leader, spec.rank, spec.incarnation, spec.epoch)
        self._watch.start()
        if self._leader is not None:
            if spec.parked:
                self._leader.gate.settle("", GateReason.ASLEEP)
            else:
                self._leader.gate.open()

    async def close(self) -> None:
        """End the engine; what still runs ends with an error event."""
        self._closing.set()
        if self._leader is not None:
            self._leader.fail("the rank was closed")
        if self._machinery is not None:
            self._machinery.ledger.stop_prefilling()
            await asyncio.to_thread(self._machinery.engine.close)
            self._machinery.ledger.let_go()

    def fail(self, reason: str) -> None:
        """The model is lost, e.g. since another rank died: close the gate for good, end what runs with an error."""
        if self._leader is not None:
            self._leader.fail(reason)

    async def status(self, epoch: int | None = None) -> RankStatus:
        """Never waits for a phase that runs. epoch: a coordinator's; calls with a lower one are refused from now on."""
        if epoch is not None:
            # Before it is loaded the spec keeps it, for the phases that are still to come.
            self._spec = replace(self._spec, epoch=max(epoch, self._spec.epoch))
            if self._phases is not None:
                self._phases.hear(epoch)
        return await asyncio.to_thread(self._status)

    # --- RankPort ---

    @traced
    async def preflight(self, call: PhaseCall, request: OperationRequest) -> PhaseReply:
        reply = await self._phases.preflight(call, request) if self._phases else self._not_loaded(call)
        return await self._with_status(reply)

    @traced
    async def drain(self, call: PhaseCall, spec: DrainSpec, timeout_s: float, lease_s: float) -> PhaseReply:
        if self._phases is None:
            return self._not_loaded(call)
        return await self._phases.drain(call, spec, timeout_s, lease_s)

    @traced
    async def stage(self, call: PhaseCall, timeout_s: float) -> PhaseReply:
        return await self._phases.stage(call, timeout_s) if self._phases else self._not_loaded(call)

    @traced
    async def commit(self, call: PhaseCall) -> PhaseReply:
        return await self._phases.commit(call) if self._phases else self._not_loaded(call)

    @traced
    async def abort(self, call: PhaseCall, lost: bool = False) -> PhaseReply:
        return await self._phases.abort(call, lost) if self._phases else self._not_loaded(call)

    @traced
    async def publish(self, call: PhaseCall) -> PhaseReply:
        reply = await self._phases.publish(call) if self._phases else self._not_loaded(call)
        return await self._with_status(reply)

    async def trim(self, target_bytes: int) -> int:
        # Not here: it waits for a stage that runs, and gives pages back to the system.
        ledger = self._machinery.ledger if self._machinery else None
        return await asyncio.to_thread(ledger.trim_host, target_bytes) if ledger else 0

    async def prefill(self, room_bytes: int, timeout_s: float, backups: bool, pool: bool) -> int:
        ledger = self._machinery.ledger if self._machinery else None
        return await asyncio.to_thread(ledger.prefill, room_bytes, timeout_s, backups, pool) if ledger else 0

    # --- LeaderPort ---

    async def submit(self, front_end: str, requests: Sequence[GenerateRequest]) -> list[AdmissionReply]:
        if self._leader is None:
            detail = f"rank {self.rank} is no leader; submit to rank 0"
            return [AdmissionReply(request.id, Admission.INVALID, detail=detail) for request in requests]
        return await self._leader.submit(front_end, requests)

    async def cancel(self, front_end: str, request_ids: Sequence[str]) -> None:
        if self._leader is not None:
            await self._leader.cancel(front_end, request_ids)

    async def abort_requests(self, front_end: str, request: str | None) -> int:
        return 0 if self._leader is None else await self._leader.abort_requests(front_end, request)

    async def aborted(self, front_end: str, order: str, count: int) -> None:
        if self._leader is not None:
            await self._leader.aborted(front_end, order, count)

    async def stream(self, front_end: str) -> AsyncIterator[list[TokenEvent | AbortOrder]]:
        if self._leader is None:
            return
        async with contextlib.aclosing(self._leader.front_ends.stream(front_end)) as batches:
            async for batch in batches:
                yield batch

    async def renew(self, front_end: str) -> None:
        if self._leader is not None:
            await self._leader.renew(front_end)

    async def detach(self, front_end: str) -> None:
        if self._leader is not None:
            await self._leader.detach(front_end)

    # --- inside ---

    async def _with_status(self, reply: PhaseReply) -> PhaseReply:
        return replace(reply, status=await asyncio.to_thread(self._status))

    def _make_leader(self) -> Leader:
        clock, engine = self._parts.clock, self._spec.model.engine
        return Leader(Gate(clock, engine.max_running + engine.max_waiting), FrontEnds(clock))

    def _load(self) -> Machinery:
        spec, parts = self._spec, self._parts
        self._device = parts.make_device(spec)
        ledger = parts.make_ledger(self._device, spec.host_pool_bytes, **spec.node.disk())
        engine = parts.make_engine(spec, ledger, self._device)
        try:
            engine.load()
            if self._leader is not None:
                self._leader.attach(engine)
                engine.start(self._leader.sink)
            else:
                engine.start(_no_events)
            sources = Sources(spec.weights_roots, parts.open_handed)
            machinery = Machinery(ledger, engine, sources, spec.model.restore_modes)
            if spec.parked:
                machinery.park(spec.parked, spec.model.verify)
        except BaseException:
            engine.close()
            raise
        arm_faults(self._device, spec.device, spec.rank)
        return machinery

    def _watch_loop(self) -> None:
        # A thread of its own: leases and a dead step loop must be seen also while the event loops are busy.
        assert self._machinery is not None
        while not self._closing.wait(TICK_S):
            if self._leader is not None:
                self._leader.tick()
            error = self._machinery.engine.error()
            if error and not self._machinery.error:
                self._machinery.error = f"the engine has stopped: {error}"
                if self._leader is not None:
                    self._leader.fail(self._machinery.error)

    def _status(self) -> RankStatus:
        machinery, leader = self._machinery, self._leader
        ledger = machinery.ledger if machinery else None
        phase, operation, kind = machinery.transaction() if machinery else (LedgerPhase.IDLE, None, None)
        # After the ledger's phase, so that `staged` without a digest is a stage whose answer is not out yet.
        staging, staging_kind = self._phases.staging() if self._phases else (None, None)
        staged = operation if phase is LedgerPhase.STAGED else None
        digest = self._phases.staged_digest(staged) if self._phases else ""
        free_bytes, total_bytes = self._device.memory_info() if self._device else (0, 0)
        reason = leader.gate.reason if leader else None
        return RankStatus(
            model=self._spec.model.name,
            rank=self.rank,
            incarnation=self._spec.incarnation,
            node=self._node,
            pid=os.getpid(),
            epoch=self._phases.epoch if self._phases else self._spec.epoch,
            loaded=machinery is not None,
            ledger_phase=phase,
            operation=operation,
            kind=kind,
            tags=tuple(ledger.tags) if ledger else (),
            parked_tags=tuple(ledger.parked_tags) if ledger else (),
            undefined_tags=machinery.undefined_tags() if machinery else (),
            device_kind=self._device.kind if self._device else "",
            device_id=self._device.id if self._device else "",
            device_kernels=self._device.kernels if self._device else "",
            device_free_bytes=free_bytes,
            device_total_bytes=total_bytes,
            host_limit_bytes=self._host_limit_bytes,
            host_idle_bytes=ledger.host_idle_bytes if ledger else 0,
            memory=tuple(machinery.memory()) if machinery else (),
            gate_open=leader is not None and reason is None,
            gate_reason=reason,
            live_sequences=leader.gate.running if leader else 0,
            idle_s=leader.front_ends.idle_s() if leader else 0.0,
            frozen_requests=leader.gate.frozen if leader else 0,
            prefix_tokens=machinery.prefix_tokens() if machinery else 0,
            error=machinery.error if machinery else self._error,
            staging=staging,
            gate_operation=leader.gate.holder if leader else None,
            staging_kind=staging_kind,
            staged_digest=digest,
            engine=machinery.engine.choices() if machinery else EngineChoices(),
            weights_version=machinery.weights_version if machinery else 0,
            paused=machinery is not None and machinery.paused,
        )

    def _not_loaded(self, call: PhaseCall) -> PhaseReply:
        reason = self._error or "the rank is still loading"
        code = RejectCode.RANK_FAILED if self._error else RejectCode.WRONG_STATE
        return PhaseReply(
            call.operation,
            call.phase,
            call.epoch,
            self.rank,
            self._spec.incarnation,
            ok=False,
            refusals=(Refusal(code, reason),),
        )


def _no_events(events: Sequence[TokenEvent]) -> None:
    """Followers make no events of their own."""
