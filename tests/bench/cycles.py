"""What the benchmarks of sleep and wake on a GPU have in common: one timed operation, the link's limit, a name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from torpor.native import Ledger


class Timed(NamedTuple):
    """Of one operation, preflight to publish: the stage's seconds, those of the whole, and the bytes moved."""

    stage_s: float
    whole_s: float
    moved_bytes: int


def operation(ledger: Ledger, kind: str, restore: Mapping[str, str]) -> Timed:
    """A whole transaction over all tags; `restore` counts for a sleep."""
    start = time.perf_counter()
    plan = ledger.preflight(kind, kind, restore=restore if kind == "sleep" else None)
    assert not plan.refusals, plan.refusals
    began = time.perf_counter()
    report = ledger.stage(plan, 120.0)
    stage_s = time.perf_counter() - began
    ledger.commit()
    ledger.publish()
    return Timed(stage_s, time.perf_counter() - start, report["moved_bytes"])


def link_seconds(size_bytes: int, repeats: int) -> tuple[list[float], list[float]]:
    """One copy to and one from page-locked memory that is there already: seconds each way, after a first of each."""
    there = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    here = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for found, to, source in ((seconds[0], here, there), (seconds[1], there, here)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            if repeat:
                found.append(time.perf_counter() - start)
    return seconds


def gpu_name() -> str:
    """Of the kept result's file."""
    return "h200" if torch.cuda.get_device_name().endswith("H200") else "gpu"
