"""A whole rank over the default engine in this process: gate, phases, ledger and streams, without Ray."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torpor.actors.config import MIB, DeviceConfig, RankSpec
from torpor.actors.engine.engine import TransformersEngine
from torpor.actors.messages import (
    DrainSpec,
    GenerateRequest,
    Kind,
    OperationRequest,
    Phase,
    PhaseCall,
    PhaseReply,
    RestoreMode,
    Sampling,
    TokenEvent,
)
from torpor.actors.rank.core import Parts, RankCore
from torpor.native import Device, Ledger

FRONT_END = "front"
WAIT_S = 60.0
DEVICE_BYTES = 64 * MIB


@dataclass
class EngineRank:
    """Rank 0 of 1. What was said lies in `events`, by request."""

    core: RankCore
    engine: TransformersEngine
    device: Device
    events: dict[str, list[TokenEvent]] = field(default_factory=lambda: defaultdict(list))
    operations: itertools.count[int] = field(default_factory=itertools.count)

    def tokens(self, request: str) -> list[int]:
        return [token for event in self.events[request] for token in event.token_ids]

    def last(self, request: str) -> TokenEvent:
        return self.events[request][-1]

    def stats(self) -> dict[str, int]:
        manager = self.engine._manager
        assert manager is not None
        return manager.stats()

    def free_bytes(self) -> int:
        return self.device.memory_info()[0]

    async def ask(self, request: str, prompt: Sequence[int], scope: str = "", **sampling: Any) -> None:
        """Greedy unless told otherwise."""
        wanted = Sampling(**({"temperature": 0.0} | sampling))
        asked = GenerateRequest(request, token_ids=tuple(prompt), sampling=wanted, scope=scope)
        (reply,) = await self.core.submit(FRONT_END, [asked])
        assert reply.admission.value == "admitted", reply

    async def until(self, true: Any, timeout_s: float = WAIT_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def ended(self, *requests: str) -> None:
        """Wait for the last event of each, and for their places to be free."""
        assert self.core._leader is not None
        gate = self.core._leader.gate
        await self.until(
            lambda: all(self.events[r] and self.events[r][-1].finish_reason is not None for r in requests)
        )
        await self.until(lambda: not set(gate.admitted()) & set(requests))

    async def stage(
        self,
        kind: Kind,
        tags: Sequence[str] | None = None,
        restore: Mapping[str, str] | None = None,
        drain: DrainSpec | None = None,
        **fields: object,
    ) -> str:
        """Preflight to stage; the operation's id. Fails with the reply that was not ok."""
        operation = f"op-{next(self.operations)}"
        modes = {tag: RestoreMode(mode) for tag, mode in (restore or {}).items()}
        drain = drain or DrainSpec()
        request = OperationRequest(kind, "tiny", tuple(tags) if tags else None, modes, drain, **fields)  # type: ignore[arg-type]
        self._ok(await self.core.preflight(self._call(operation, Phase.PREFLIGHT), request))
        if kind not in (Kind.WAKE, Kind.UNPAUSE):
            self._ok(await self.core.drain(self._call(operation, Phase.DRAIN), drain, WAIT_S, WAIT_S))
        self._ok(await self.core.stage(self._call(operation, Phase.STAGE), WAIT_S))
        return operation

    async def abort(self, operation: str) -> None:
        self._ok(await self.core.abort(self._call(operation, Phase.STAGE)))

    async def operate(self, kind: Kind, *tags: str, **more: Any) -> PhaseReply:
        """All phases; the commit's reply."""
        operation = await self.stage(kind, tags, **more)
        reply = self._ok(await self.core.commit(self._call(operation, Phase.COMMIT)))
        self._ok(await self.core.publish(self._call(operation, Phase.PUBLISH)))
        return reply

    async def sleep(self, *tags: str, **more: Any) -> PhaseReply:
        return await self.operate(Kind.SLEEP, *tags, **more)

    async def wake(self, *tags: str, **more: Any) -> PhaseReply:
        return await self.operate(Kind.WAKE, *tags, **more)

    async def update(self, path: object, **more: Any) -> PhaseReply:
        return await self.operate(Kind.UPDATE, "weights", weights_path=str(path), **more)

    def _call(self, operation: str, phase: Phase) -> PhaseCall:
        return PhaseCall(operation, phase, 1)

    def _ok(self, reply: PhaseReply) -> PhaseReply:
        assert reply.ok, reply
        return reply

    async def collect(self) -> None:
        async for batch in self.core.stream(FRONT_END):
            for event in batch:
                self.events[event.request].append(event)


async def keep_lease(core: RankCore, front_end: str) -> None:
    while True:
        await core.renew(front_end)
        await asyncio.sleep(1.0)


@asynccontextmanager
async def engine_rank(spec: RankSpec, renews: bool = True, **parts: Any) -> AsyncIterator[EngineRank]:
    """Loaded, with a front end that reads. At the end the step loop must not have died.

    spec: as dummy_spec makes it. renews: the front end keeps its lease.
    """
    name = f"engine-{uuid.uuid4().hex[:12]}"
    made: list[tuple[TransformersEngine, Device]] = []

    def engine(spec: RankSpec, ledger: Ledger, device: Device) -> TransformersEngine:
        made.append((TransformersEngine(spec, ledger, device), device))
        return made[-1][0]

    device = DeviceConfig(kind="host", name=name, host_capacity_bytes=DEVICE_BYTES)
    core = RankCore(replace(spec, device=device), Parts(make_engine=engine, **parts))
    await core.load()
    rank = EngineRank(core, *made[-1])
    tasks = [asyncio.create_task(rank.collect())]
    if renews:
        tasks.append(asyncio.create_task(keep_lease(core, FRONT_END)))
    try:
        yield rank
        assert rank.engine.error() == ""
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await core.close()
