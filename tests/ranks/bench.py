"""A rank on a workbench: the core without Ray, with short words for what tests do to it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field, replace

from ranks.toys import MIB, ToyEngine
from torpor.actors.config import DeviceConfig, EngineConfig, ModelConfig, RankSpec
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    GenerateRequest,
    Kind,
    OperationRequest,
    Phase,
    PhaseCall,
    PhaseReply,
    RankStatus,
    RestoreMode,
    Sampling,
    TokenEvent,
)
from torpor.actors.rank.core import Parts, RankCore
from torpor.native import Device, FaultyDevice, Ledger

CAPACITY_BYTES = 96 * MIB


@dataclass
class Bench:
    core: RankCore
    engine: ToyEngine
    ledger: Ledger
    device: FaultyDevice
    epoch: int = 1
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def call(self, phase: Phase, operation: str = "op") -> PhaseCall:
        return PhaseCall(operation, phase, self.epoch)

    def free_bytes(self) -> int:
        return self.device.memory_info()[0]

    async def status(self, epoch: int | None = None) -> RankStatus:
        return await self.core.status(epoch)

    async def admit(self, *requests: GenerateRequest) -> list[str]:
        return [reply.admission.value for reply in await self.core.submit("front", requests)]

    def request(self, tokens: int = 4, prompt: str = "hello") -> GenerateRequest:
        return GenerateRequest(f"r{next(self.numbers)}", prompt, sampling=Sampling(max_tokens=tokens))

    async def preflight(self, request: OperationRequest, operation: str = "op") -> PhaseReply:
        return await self.core.preflight(self.call(Phase.PREFLIGHT, operation), request)

    async def drain(
        self,
        operation: str = "op",
        mode: DrainMode = DrainMode.FINISH,
        timeout_s: float = 5.0,
        lease_s: float = 10.0,
    ) -> PhaseReply:
        return await self.core.drain(self.call(Phase.DRAIN, operation), DrainSpec(mode), timeout_s, lease_s)

    async def stage(self, operation: str = "op", timeout_s: float = 5.0) -> PhaseReply:
        return await self.core.stage(self.call(Phase.STAGE, operation), timeout_s)

    async def commit(self, operation: str = "op") -> PhaseReply:
        return await self.core.commit(self.call(Phase.COMMIT, operation))

    async def publish(self, operation: str = "op") -> PhaseReply:
        return await self.core.publish(self.call(Phase.PUBLISH, operation))

    async def abort(self, operation: str = "op", lost: bool = False) -> PhaseReply:
        return await self.core.abort(self.call(Phase.STAGE, operation), lost)

    async def until_staged(self, request: OperationRequest, operation: str = "op") -> None:
        assert (await self.preflight(request, operation)).ok
        if request.kind not in (Kind.WAKE, Kind.UNPAUSE):
            assert (await self.drain(operation, request.drain.mode)).ok
        reply = await self.stage(operation)
        assert reply.ok, reply

    async def whole(self, request: OperationRequest, operation: str = "op") -> PhaseReply:
        """All five phases; returns the commit's reply."""
        await self.until_staged(request, operation)
        reply = await self.commit(operation)
        assert reply.ok, reply
        assert (await self.publish(operation)).ok
        return reply

    async def read(self, request: str, timeout_s: float = 5.0) -> list[TokenEvent]:
        """The events of one request, to its end."""
        events: list[TokenEvent] = []
        async with asyncio.timeout(timeout_s):
            async for batch in self.core.stream("front"):
                events += [event for event in batch if event.request == request]
                if events and events[-1].finish_reason is not None:
                    return events
        raise AssertionError(f"the stream ended before {request} did: {events}")


def sleep(*tags: str, **restore: RestoreMode) -> OperationRequest:
    return OperationRequest(Kind.SLEEP, "toy", tags or None, restore)


def wake(*tags: str) -> OperationRequest:
    return OperationRequest(Kind.WAKE, "toy", tags or None)


def spec(name: str, rank: int = 0) -> RankSpec:
    engine = EngineConfig(kind="toy", max_running=64, max_waiting=64)
    device = DeviceConfig(kind="host", name=name, host_capacity_bytes=CAPACITY_BYTES, faults={rank: {}})
    return RankSpec(ModelConfig("toy", engine), rank, "incarnation", device, 0, 64 * MIB)


async def make_bench(name: str, rank: int = 0, parts: Parts | None = None, **changes: object) -> Bench:
    """A loaded rank on a faulty host device of its own, with nothing armed."""
    made: list[ToyEngine] = []
    devices: list[Device] = []

    def engine(spec: RankSpec, ledger: Ledger, device: Device) -> ToyEngine:
        made.append(ToyEngine(spec, ledger, device))
        devices.append(device)
        return made[-1]

    core = RankCore(replace(spec(name, rank), **changes), replace(parts or Parts(), make_engine=engine))
    await core.load()
    device = devices[-1]
    assert isinstance(device, FaultyDevice)
    return Bench(core, made[-1], made[-1].ledger, device)
