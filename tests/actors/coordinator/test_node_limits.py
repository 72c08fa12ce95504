"""What a node may keep: its cgroups' limits, v1 and v2, wherever they are set; and its disk (F18, M8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_rig import CONFIG, RANK_BYTES, SLEEP, WAKE, WEIGHTS_BYTES, Rig, asking

from torpor.actors.config import NodeBudget
from torpor.actors.coordinator import MemoryRank
from torpor.actors.limits import host_limit_bytes
from torpor.actors.messages import (
    Kind,
    OperationRequest,
    OperationState,
    PhaseCall,
    PhaseReply,
    RankStatus,
    RejectCode,
)

V2, V1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"
MACHINE = {"/proc/meminfo": "MemTotal: 1000 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # A service of systemd's: its own group has none, the slice above has.
        ({"/proc/self/cgroup": "0::/a.slice/b.service\n", f"{V2}/a.slice/memory.max": "5000\n"}, 4500),
        (
            {"/proc/self/cgroup": "0::/a.slice/b.service\n", f"{V2}/a.slice/b.service/memory.max": "max\n"},
            921600,
        ),
        (
            {
                "/proc/self/cgroup": "0::/a.slice/b.service\n",
                f"{V2}/a.slice/memory.max": "5000\n",
                f"{V2}/a.slice/b.service/memory.max": "4000\n",
            },
            3600,
        ),
        ({"/proc/self/cgroup": "4:cpu,memory:/job/7\n", f"{V1}/job/7/memory.limit_in_bytes": "3000\n"}, 2700),
        ({"/proc/self/cgroup": "4:memory:/job/7\n", f"{V1}/job/memory.limit_in_bytes": "2000\n"}, 1800),
        (
            {"/proc/self/cgroup": "4:memory:/x\n", f"{V1}/x/memory.limit_in_bytes": "9223372036854771712\n"},
            921600,
        ),
        # A container: what it is told of its group is not there, the root is its own.
        ({"/proc/self/cgroup": "0::/docker/abc\n", f"{V2}/memory.max": "6000\n"}, 5400),
        ({"/proc/self/cgroup": "3:cpu:/y\n"}, 921600),
        ({"/proc/self/cgroup": "nonsense\n", f"{V2}/memory.max": "not a number\n"}, 921600),
    ],
)
def test_the_lowest_limit_of_all_groups_around_a_process_binds(files: dict[str, str], expected: int) -> None:
    assert host_limit_bytes(None, (MACHINE | files).get) == expected


def test_every_node_has_its_own_limit_unless_one_is_configured_for_all(tmp_path: Path) -> None:
    """F18: the coordinator's node may be larger than the one that a rank is on."""
    small = Rig(tmp_path / "small.db")

    async def small_story() -> None:
        rig = small
        for rank in rig.chat:
            say(rank, host_limit_bytes=3 * WEIGHTS_BYTES - 1)
        refused = await rig.do(SLEEP)
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.HOST_MEMORY)
        assert refused.needed_bytes == 3 * WEIGHTS_BYTES

    small.run(small_story)
    configured = Rig(tmp_path / "b.db", replace(CONFIG, node=NodeBudget(host_bytes=1 << 40)))

    async def configured_story() -> None:
        for rank in configured.chat:
            say(rank, host_limit_bytes=1)
        assert (await configured.do(SLEEP)).state is OperationState.SUCCEEDED

    configured.run(configured_story)


def test_a_sleep_that_would_take_more_of_the_disk_than_the_node_may_is_rejected(tmp_path: Path) -> None:
    """What sleeping models keep there counts, and comes back with their wake."""
    rig = Rig(tmp_path / "journal.db", replace(CONFIG, node=NodeBudget(disk_bytes=3 * RANK_BYTES)))

    async def story() -> None:
        for rank in (*rig.chat, rig.solo):
            keep_on_disk(rank)
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED
        free = rig.free_bytes()
        refused = await rig.do(asking(Kind.SLEEP, "solo"))
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.DISK_SPACE)
        assert (refused.needed_bytes, refused.free_bytes) == (RANK_BYTES, 0)
        assert "node.disk_bytes" in (refused.reason or "")
        assert rig.free_bytes() == free and rig.gate_open("solo") and rig.coordinator.reserved_bytes() == 0
        assert (await rig.do(WAKE)).state is OperationState.SUCCEEDED
        assert (await rig.do(asking(Kind.SLEEP, "solo"))).state is OperationState.SUCCEEDED

    rig.run(story)


def say(rank: MemoryRank, **fields: int) -> None:
    """Its status says this, too."""
    tell: Callable[[], RankStatus] = rank._status
    rank._status = lambda: replace(tell(), **fields)  # type: ignore[method-assign, arg-type]


def keep_on_disk(rank: MemoryRank) -> None:
    """As with a restore mode that keeps contents in a file."""
    ledger = rank.ledger
    plan, rows = ledger.preflight, ledger.memory

    def preflight(call: PhaseCall, request: OperationRequest) -> PhaseReply:
        reply = plan(call, request)
        return replace(reply, host_bytes=0, disk_bytes=reply.freed_bytes)

    def memory() -> tuple[dict[str, object], ...]:
        return tuple(
            row | {"host_bytes": 0, "disk_bytes": row["reserved_bytes"] if row["parked"] else 0}
            for row in rows()
        )

    ledger.preflight, ledger.memory = preflight, memory  # type: ignore[method-assign]


def test_a_sleep_that_would_evict_and_still_not_fit_its_node_names_the_bytes_and_drops_nothing(
    tmp_path: Path,
) -> None:
    """K9: what goes is chosen by each rank's own ceiling; the node's is looked at before anything is dropped."""
    rig = Rig(tmp_path / "journal.db", host_limit_bytes=3 * WEIGHTS_BYTES - 1)

    async def story() -> None:
        for rank in rig.chat:
            plan = rank.ledger.preflight
            rank.ledger.preflight = lambda call, asked, plan=plan: replace(  # type: ignore[method-assign,misc]
                plan(call, asked), prefix_tokens_lost=7
            )
        free = rig.free_bytes()
        refused = await rig.do(replace(SLEEP, overflow="evict"))
        assert (refused.state, refused.code) == (OperationState.REJECTED, RejectCode.HOST_MEMORY)
        assert (refused.needed_bytes, refused.free_bytes) == (3 * WEIGHTS_BYTES, 3 * WEIGHTS_BYTES - 1)
        assert "raise node.host_bytes" in str(refused.reason) and refused.prefix_tokens_lost == 0
        assert not any({"drain", "stage"} & set(rank.calls) for rank in rig.chat)
        rig.assert_untouched(free)

    rig.run(story)
