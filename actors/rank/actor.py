"""A rank as a Ray actor: a thin shell around RankCore.

Made by the coordinator alone. The constructor takes no device memory; `load` does. Control, health and inference
each have a group of their own, with its own thread and event loop, so that tokens never wait for a phase, and a
look at the state for neither.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar, cast

import ray

from torpor.actors.config import RankSpec
from torpor.actors.messages import (
    AbortOrder,
    AdmissionReply,
    DrainSpec,
    GenerateRequest,
    OperationRequest,
    PhaseCall,
    PhaseReply,
    RankStatus,
    TokenEvent,
)
from torpor.actors.rank.addresses import free_addresses
from torpor.actors.rank.core import Parts, RankCore
from torpor.actors.rank.offer import cuda_offer, list_gpus, offer_of
from torpor.actors.ray.handover import open_handed
from torpor.actors.ray.raylet import end_with_raylet
from torpor.actors.seats import Offer
from torpor.actors.tracing.provider import set_up as set_up_tracing

# The step thread must not keep the event loops waiting for the default 5 ms.
SWITCH_INTERVAL_S = 0.0005
GROUPS = {"control": 16, "health": 32, "inference": 1000}


F = TypeVar("F", bound=Callable[..., Any])


def in_group(group: str, **options: Any) -> Callable[[F], F]:
    """`ray.method`, which has no types of its own."""
    return cast(Callable[[F], F], ray.method(concurrency_group=group, **options))


class RankActor:
    """RankPort and LeaderPort, called from other processes."""

    def __init__(self, spec: RankSpec, threads: int) -> None:
        """threads: of this rank's computing on the CPU, its share of the node."""
        end_with_raylet()
        set_up_tracing(os.environ)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # Ray says 1 to an actor without CPUs of its own. Read by torch when the engine imports it, which is later.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self._spec = spec
        self._core = RankCore(
            spec, Parts(open_handed=open_handed), node=ray.get_runtime_context().get_node_id()
        )
        self._addresses: tuple[str, str] | None = None

    @in_group("health")
    async def addresses(self, host: str | None = None) -> tuple[str, str]:
        """Two "host:port" on this node for the ranks of a model to meet at; the same ones each time."""
        if self._addresses is None:
            first, second = free_addresses(host or ray.util.get_node_ip_address())
            self._addresses = first, second
        return self._addresses

    @in_group("health")
    async def offer(self) -> Offer:
        """The devices of this node. Touches none."""
        context = ray.get_runtime_context()
        node, given = context.get_node_id(), context.get_accelerator_ids().get("GPU", [])

        def gpus() -> Offer:
            managed = next(each["Resources"].get("GPU", 0) for each in ray.nodes() if each["NodeID"] == node)
            return cuda_offer(node, list_gpus(), given, int(managed))

        return await asyncio.to_thread(offer_of, self._spec, node, self._core.device_id, gpus)

    @in_group("control")
    async def load(self, process_group: str = "", step_channel: str = "", device_id: str = "") -> None:
        await self._core.load(process_group, step_channel, device_id)

    @in_group("control")
    async def close(self) -> None:
        await self._core.close()

    @in_group("health")
    async def fail(self, reason: str) -> None:
        self._core.fail(reason)

    @in_group("health")
    async def status(self, epoch: int | None = None) -> RankStatus:
        return await self._core.status(epoch)

    @in_group("control")
    async def preflight(self, call: PhaseCall, request: OperationRequest) -> PhaseReply:
        return await self._core.preflight(call, request)

    @in_group("control")
    async def drain(self, call: PhaseCall, spec: DrainSpec, timeout_s: float, lease_s: float) -> PhaseReply:
        return await self._core.drain(call, spec, timeout_s, lease_s)

    @in_group("control")
    async def stage(self, call: PhaseCall, timeout_s: float) -> PhaseReply:
        return await self._core.stage(call, timeout_s)

    @in_group("control")
    async def commit(self, call: PhaseCall) -> PhaseReply:
        return await self._core.commit(call)

    @in_group("control")
    async def abort(self, call: PhaseCall, lost: bool = False) -> PhaseReply:
        return await self._core.abort(call, lost)

    @in_group("control")
    async def publish(self, call: PhaseCall) -> PhaseReply:
        return await self._core.publish(call)

    @in_group("control")
    async def trim(self, target_bytes: int) -> int:
        return await self._core.trim(target_bytes)

    @in_group("control")
    async def prefill(self, room_bytes: int, timeout_s: float, backups: bool, pool: bool) -> int:
        return await self._core.prefill(room_bytes, timeout_s, backups, pool)

    @in_group("inference")
    async def submit(self, front_end: str, requests: Sequence[GenerateRequest]) -> list[AdmissionReply]:
        return await self._core.submit(front_end, requests)

    @in_group("inference")
    async def cancel(self, front_end: str, request_ids: Sequence[str]) -> None:
        await self._core.cancel(front_end, request_ids)

    @in_group("inference")
    async def abort_requests(self, front_end: str, request: str | None) -> int:
        return await self._core.abort_requests(front_end, request)

    @in_group("inference")
    async def aborted(self, front_end: str, order: str, count: int) -> None:
        await self._core.aborted(front_end, order, count)

    @in_group("inference", num_returns="streaming")
    async def stream(self, front_end: str) -> AsyncIterator[list[TokenEvent | AbortOrder]]:
        async for batch in self._core.stream(front_end):
            yield batch

    @in_group("health")
    async def renew(self, front_end: str) -> None:
        await self._core.renew(front_end)

    @in_group("inference")
    async def detach(self, front_end: str) -> None:
        await self._core.detach(front_end)
