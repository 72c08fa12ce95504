"""What an operation costs the coordinator by the number of ranks, counted in calls: no clock, no noise (P8)."""

from __future__ import annotations

import sys
from types import FrameType

from coordinator_memory_journal import JournalStore
from coordinator_rig import SLEEP, WAKE, MemoryRig, asking

from torpor.actors.config import ClusterConfig, DeviceConfig, ModelConfig
from torpor.actors.messages import Kind, OperationRequest, OperationState, Origin


def calls(ranks: int, *requests: OperationRequest) -> int:
    """Of Python functions and generators, for these operations; ranks and event loop are in it."""
    rig = MemoryRig(
        JournalStore(),
        ClusterConfig(
            (ModelConfig("chat", tensor_parallel=ranks),), device=DeviceConfig(host_capacity_bytes=1 << 40)
        ),
    )
    counted = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal counted
        counted += event == "call"

    async def story() -> None:
        for request in (SLEEP, WAKE):
            await rig.do(request)
        sys.setprofile(count)
        try:
            for request in requests:
                assert (await rig.do(request)).state is OperationState.SUCCEEDED
        finally:
            sys.setprofile(None)

    rig.run(story)
    return counted


def added(few: int, many: int, *requests: OperationRequest) -> float:
    """By each rank more."""
    return (calls(many, *requests) - calls(few, *requests)) / (many - few)


def test_what_one_more_rank_costs_does_not_depend_on_how_many_there_are() -> None:
    asked = (SLEEP, WAKE)
    unasked = (asking(Kind.SLEEP, origin=Origin.IDLENESS), asking(Kind.WAKE, origin=Origin.REQUEST))
    for requests in (asked, unasked):
        among_few, among_many = added(4, 8, *requests), added(32, 64, *requests)
        assert among_many < 1.2 * among_few, f"{among_few:.0f} calls, then {among_many:.0f}"
