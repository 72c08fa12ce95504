"""RankPort over a rank's actor, and Control over the coordinator's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from torpor.actors.audit import AuditEntry
from torpor.actors.config import ClusterConfig, ModelConfig
from torpor.actors.messages import (
    DrainSpec,
    Hold,
    ModelView,
    Operation,
    OperationRequest,
    OperationState,
    PhaseCall,
    PhaseReply,
    RankStatus,
    Trimmed,
)
from torpor.actors.news import Changes, Position
from torpor.actors.ports import ControlUnreachable, RankUnreachable
from torpor.actors.ray.calls import ActorGone, call, first_line
from torpor.actors.ray.lifeline import Cut, Lifeline
from torpor.actors.ray.lookup import Lookup
from torpor.actors.ray.names import COORDINATOR, NOBODY

WAIT_SLICE_S = 5.0  # the longest single wait at the coordinator, so that its death is noticed
SILENT_S = 60.0  # twice what any call takes it, and longer than it takes to begin anew
FIRST_S = 300.0  # before it has ever answered: its process may have to start, on a busy machine


class RayRankPort:
    """A RankPort. The actor's death is RankUnreachable; an actor that does not answer is asked on (unknown)."""

    def __init__(self, rank: int, handle: ActorHandle | None) -> None:
        """handle None: there is no such actor any more."""
        self.rank = rank
        self._handle = handle

    async def status(self, epoch: int | None = None) -> RankStatus:
        return cast(RankStatus, await self._call("status", epoch))

    async def preflight(self, call: PhaseCall, request: OperationRequest) -> PhaseReply:
        return cast(PhaseReply, await self._call("preflight", call, request))

    async def drain(self, call: PhaseCall, spec: DrainSpec, timeout_s: float, lease_s: float) -> PhaseReply:
        return cast(PhaseReply, await self._call("drain", call, spec, timeout_s, lease_s))

    async def stage(self, call: PhaseCall, timeout_s: float) -> PhaseReply:
        return cast(PhaseReply, await self._call("stage", call, timeout_s))

    async def commit(self, call: PhaseCall) -> PhaseReply:
        return cast(PhaseReply, await self._call("commit", call))

    async def abort(self, call: PhaseCall, lost: bool = False) -> PhaseReply:
        return cast(PhaseReply, await self._call("abort", call, lost))

    async def publish(self, call: PhaseCall) -> PhaseReply:
        return cast(PhaseReply, await self._call("publish", call))

    async def trim(self, target_bytes: int) -> int:
        return cast(int, await self._call("trim", target_bytes))

    async def prefill(self, room_bytes: int, timeout_s: float, backups: bool, pool: bool) -> int:
        return cast(int, await self._call("prefill", room_bytes, timeout_s, backups, pool))

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._handle is None:
            raise RankUnreachable(f"rank {self.rank} is gone: no actor has its name")
        try:
            return await call(self._handle, method, *arguments)
        except ActorGone as error:
            raise RankUnreachable(f"rank {self.rank} is gone: {error}") from error


class RayControl:
    """A Control over the coordinator's actor, which may die and come back meanwhile.

    Whatever is asked may be asked again: an operation equal to the running one is joined, and one that has its
    effect already changes nothing (C1, C4).
    """

    def __init__(
        self,
        namespace: str,
        find: Callable[[str], ActorHandle] | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        """silent_s: without an answer for so long it counts as unreachable, be it stopped, or its node cut off."""
        self._namespace = namespace
        self._silent_s = silent_s
        self._has_answered = False
        self._lookup = Lookup(find or (lambda name: ray.get_actor(name, namespace)))
        self._handle: ActorHandle | None = None
        self._line = Lifeline()

    def give_up(self, why: str) -> None:
        """The cluster is lost: whoever asks, or waits, is told so."""
        self._line.cut(why)

    async def head_answers(self) -> bool:
        """Whether there is somebody to ask for a coordinator, be there one or not.

        Of an actor that it has found before Ray tells without asking its head: so it is asked for another.
        """
        try:
            await self._lookup.of(NOBODY)
        except ValueError:
            return True
        except (RayError, OSError, RuntimeError):
            return False
        return True

    async def submit(self, request: OperationRequest) -> Operation:
        return cast(Operation, await self._call("submit", request))

    async def wait(self, operation_id: str, timeout_s: float | None = None) -> Operation:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = WAIT_SLICE_S if end is None else min(WAIT_SLICE_S, max(0.0, end - time.monotonic()))
            operation = cast(Operation, await self._call("wait", operation_id, left))
            out_of_time = end is not None and time.monotonic() >= end
            if operation.state is not OperationState.RUNNING or out_of_time:
                return operation

    async def operation(self, operation_id: str) -> Operation:
        return cast(Operation, await self._call("operation", operation_id))

    async def operations(self, model: str | None = None, limit: int = 100) -> list[Operation]:
        return cast("list[Operation]", await self._call("operations", model, limit))

    async def cancel(self, operation_id: str) -> bool:
        return bool(await self._call("cancel", operation_id))

    async def watch(self, name: str, seen: ModelView | None, timeout_s: float) -> ModelView:
        return cast(ModelView, await self._call("watch", name, seen, min(timeout_s, WAIT_SLICE_S)))

    async def renew(self, operation_id: str) -> Hold:
        return cast(Hold, await self._call("renew", operation_id))

    async def trim(self, name: str, target_bytes: int) -> list[Trimmed]:
        return cast("list[Trimmed]", await self._call("trim", name, target_bytes))

    async def changes(self, after: Position | None, wait_s: float) -> Changes:
        return cast(Changes, await self._call("changes", after, min(wait_s, WAIT_SLICE_S)))

    async def audit(self, entry: AuditEntry) -> None:
        await self._call("audit", entry)

    async def audits(self, limit: int = 100) -> list[AuditEntry]:
        return cast("list[AuditEntry]", await self._call("audits", limit))

    async def models(self, detail: bool = False) -> list[ModelView]:
        return cast("list[ModelView]", await self._call("models", detail))

    async def model(self, name: str) -> ModelView:
        return cast(ModelView, await self._call("model", name))

    async def describe(self) -> ClusterConfig:
        return cast(ClusterConfig, await self._call("describe"))

    async def create(self, model: ModelConfig) -> ModelView:
        return cast(ModelView, await self._call("create", model))

    async def adapt(self, model: ModelConfig) -> ModelView:
        return cast(ModelView, await self._call("adapt", model))

    async def _call(self, method: str, *arguments: Any) -> Any:
        silent_s = self._silent_s if self._has_answered else max(FIRST_S, self._silent_s)
        limit = asyncio.timeout(silent_s)
        try:
            async with limit:
                answer = await self._line.hold(self._ask(method, *arguments))
            self._has_answered = True
            return answer
        except Cut as error:
            raise ControlUnreachable(str(error)) from error
        except TimeoutError as error:
            if not limit.expired():
                raise  # the coordinator's own
            self._handle = None
            raise ControlUnreachable(
                f"the coordinator has not answered for {silent_s:g} s; whether it has heard is not known, and "
                "asking again does no harm"
            ) from error
        except (ActorGone, ValueError) as error:
            self._handle = None
            raise ControlUnreachable(
                f"no coordinator in the namespace {self._namespace!r} ({error}); start one with "
                "`torpor serve` or `torpor apply`"
            ) from error

    async def _ask(self, method: str, *arguments: Any) -> Any:
        handle = self._handle
        if handle is None:
            try:
                handle = self._handle = await self._lookup.of(COORDINATOR)
            except (RayError, OSError, RuntimeError) as error:
                raise ControlUnreachable(f"Ray cannot be reached: {first_line(error)}") from error
        return await call(handle, method, *arguments)
