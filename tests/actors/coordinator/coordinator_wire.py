"""The way between a coordinator and a rank, on which single messages go wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from enum import StrEnum
from typing import TypeVar

from coordinator_rig import MemoryRig

from torpor.actors.coordinator import MemoryRank
from torpor.actors.messages import DrainSpec, OperationRequest, Phase, PhaseCall, PhaseReply, RankStatus

A = TypeVar("A", PhaseReply, RankStatus)
LATE_S = 200.0  # later than all deadlines of an operation


class Mishap(StrEnum):
    LOST = "lost"
    ANSWER_LOST = "answer_lost"
    LATE = "late"
    ANSWER_LATE = "answer_late"
    DOUBLED = "doubled"
    WRONG_EPOCH = "wrong_epoch"
    WRONG_OPERATION = "wrong_operation"
    WRONG_PHASE = "wrong_phase"
    WRONG_RANK = "wrong_rank"
    WRONG_INCARNATION = "wrong_incarnation"
    WRONG_DIGEST = "wrong_digest"
    DIES_BEFORE = "dies_before"
    DIES_AFTER = "dies_after"  # having done it, before it answers
    DIES_ANSWERED = "dies_answered"


_LIES: dict[Mishap, Callable[[PhaseReply], PhaseReply]] = {
    Mishap.WRONG_EPOCH: lambda reply: replace(reply, epoch=reply.epoch - 1),
    Mishap.WRONG_OPERATION: lambda reply: replace(reply, operation="op-another"),
    Mishap.WRONG_PHASE: lambda reply: replace(reply, phase=Phase.LOAD),
    Mishap.WRONG_RANK: lambda reply: replace(reply, rank=reply.rank + 1),
    Mishap.WRONG_INCARNATION: lambda reply: replace(reply, incarnation="another"),
    Mishap.WRONG_DIGEST: lambda reply: replace(reply, digest="another"),
}
_STATUS_LIES: dict[Mishap, Callable[[RankStatus], RankStatus]] = {
    Mishap.WRONG_OPERATION: lambda status: replace(status, operation="op-another"),
    Mishap.WRONG_RANK: lambda status: replace(status, rank=status.rank + 1),
    Mishap.WRONG_INCARNATION: lambda status: replace(status, incarnation="another"),
    Mishap.WRONG_DIGEST: lambda status: replace(status, staged_digest="another"),
}


class Wire:
    """RankPort. mishaps: by method and how many calls of it there have been, this one included."""

    def __init__(self, rank: MemoryRank) -> None:
        self.rank = rank.rank
        self.mishaps: dict[tuple[str, int], Mishap] = {}
        self.met: list[Mishap] = []
        self._rank = rank
        self._calls: Counter[str] = Counter()
        self._under_way: set[asyncio.Task[object]] = set()

    def arm(self, mishaps: dict[tuple[str, int], Mishap]) -> None:
        """Calls are counted from now on."""
        self.mishaps = mishaps
        self._calls.clear()

    async def status(self, epoch: int | None = None) -> RankStatus:
        return await self._send("status", lambda: self._rank.status(epoch), _STATUS_LIES)

    async def preflight(self, call: PhaseCall, request: OperationRequest) -> PhaseReply:
        return await self._send("preflight", lambda: self._rank.preflight(call, request), _LIES)

    async def drain(self, call: PhaseCall, spec: DrainSpec, timeout_s: float, lease_s: float) -> PhaseReply:
        return await self._send("drain", lambda: self._rank.drain(call, spec, timeout_s, lease_s), _LIES)

    async def stage(self, call: PhaseCall, timeout_s: float) -> PhaseReply:
        return await self._send("stage", lambda: self._rank.stage(call, timeout_s), _LIES)

    async def commit(self, call: PhaseCall) -> PhaseReply:
        return await self._send("commit", lambda: self._rank.commit(call), _LIES)

    async def abort(self, call: PhaseCall, lost: bool = False) -> PhaseReply:
        return await self._send("abort", lambda: self._rank.abort(call, lost), _LIES)

    async def publish(self, call: PhaseCall) -> PhaseReply:
        return await self._send("publish", lambda: self._rank.publish(call), _LIES)

    async def _send(
        self, method: str, call: Callable[[], Awaitable[A]], lies: dict[Mishap, Callable[[A], A]]
    ) -> A:
        self._calls[method] += 1
        mishap = self.mishaps.get((method, self._calls[method]))
        if mishap is None:
            return await call()
        self.met.append(mishap)
        # What is on its way stays so, whatever becomes of who has sent it.
        task = asyncio.ensure_future(self._go_wrong(mishap, call, lies))
        self._under_way.add(task)
        task.add_done_callback(self._arrived)
        return await asyncio.shield(task)

    def _arrived(self, task: asyncio.Task[object]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()

    async def _go_wrong(
        self, mishap: Mishap, call: Callable[[], Awaitable[A]], lies: dict[Mishap, Callable[[A], A]]
    ) -> A:
        if mishap is Mishap.LOST:
            await asyncio.Event().wait()
        if mishap is Mishap.LATE:
            await asyncio.sleep(LATE_S)
        if mishap is Mishap.DIES_BEFORE:
            self._rank.die()
        if mishap is Mishap.DOUBLED:
            return (await asyncio.gather(call(), call()))[0]
        answer = await call()
        if mishap is Mishap.ANSWER_LOST:
            await asyncio.Event().wait()
        if mishap is Mishap.ANSWER_LATE:
            await asyncio.sleep(LATE_S)
        if mishap in (Mishap.DIES_AFTER, Mishap.DIES_ANSWERED):
            self._rank.die()
        return await call() if mishap is Mishap.DIES_AFTER else lies.get(mishap, lambda told: told)(answer)


class WiredRig(MemoryRig):
    """Every coordinator speaks with chat over the same wires."""

    @property
    def wires(self) -> list[Wire]:
        return self._wires

    async def prepare(self) -> None:
        await super().prepare()
        self._wires = [Wire(rank) for rank in self.chat]
        await self.coordinator.attach("chat", self._wires)
