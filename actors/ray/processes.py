"""Whether a rank's process is gone: only then the kernel has its memory back, whatever Ray says of the actor."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

LOOK_S = 0.05
SLICE_S = 5.0  # of one wait, which nobody can call off
_BEGAN = 19  # of what follows the name in /proc/PID/stat


@dataclass(frozen=True, slots=True)
class RankProcess:
    node: str  # as Ray names it
    pid: int
    began: str = (
        ""  # as the kernel counts, so that another one with its number is not taken for it; "" = not known
    )


def process_of(node: str, pid: int) -> RankProcess:
    """One that lives now."""
    here = node == ray.get_runtime_context().get_node_id()
    return RankProcess(node, pid, start_of(pid) if here else "")


async def until_gone(process: RankProcess) -> None:
    """Until no such process is left on its node. Without end: the caller has the deadline."""
    if process.node == ray.get_runtime_context().get_node_id():
        while not await asyncio.to_thread(wait_until_gone, process, SLICE_S):
            pass
        return
    alive = {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}
    if process.node not in alive:
        return  # it went with its node
    there = NodeAffinitySchedulingStrategy(process.node, soft=False)
    far = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(wait_until_gone)
    while not await far.remote(process, SLICE_S):
        pass


def is_there(pid: int, began: str = "") -> bool:
    """Whether it may have memory still: one that has ended with all its threads, and is uncollected, has none."""
    stat = _stat(pid)
    if not stat or began not in ("", stat[_BEGAN]):
        return False
    return stat[0] not in ("Z", "X") or _threads(pid) > 1


def start_of(pid: int) -> str:
    """When, as the kernel counts; "" = there is no such process."""
    return (_stat(pid) or [""] * (_BEGAN + 1))[_BEGAN]


def _threads(pid: int) -> int:
    """The first one may be at its end while others are not."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return 0


def _stat(pid: int) -> list[str]:
    """Its state, and what follows it in /proc/PID/stat; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def wait_until_gone(process: RankProcess, timeout_s: float) -> bool:
    """On the process's own node."""
    ends_at = time.monotonic() + timeout_s
    while is_there(process.pid, process.began):
        if time.monotonic() > ends_at:
            return False
        time.sleep(LOOK_S)
    return True
