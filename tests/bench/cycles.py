"""What the benchmarks of sleep and wake have in common: one timed operation, the link's limit, a name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from torpor.native import Ledger

PARTS = ("planning_s", "mapping_s", "copying_s", "waiting_s", "ahead_s")


class Timed(NamedTuple):
    """Of one operation, preflight to publish: the stage's seconds, those of the whole, the bytes moved, and what of
    the stage went into books, mapping, and copies (of KV caches); of the copies, waiting for them; of books and
    mapping, what came before the first copy."""

    stage_s: float
    whole_s: float
    moved_bytes: int
    planning_s: float
    mapping_s: float
    copying_s: float
    waiting_s: float
    ahead_s: float


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
    whole_s = time.perf_counter() - start
    return Timed(stage_s, whole_s, report["moved_bytes"], **{part: report[part] for part in PARTS})


class Link:
    """One copy to and one from page-locked memory that is there already: what nothing can be faster than."""

    def __init__(self, size_bytes: int) -> None:
        self.there = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        self.here = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        self.copy()  # the first of each is slower

    def copy(self) -> tuple[float, float]:
        """Seconds from the GPU, and to it."""
        return self.out(), self.back()

    def out(self) -> float:
        return self._one(self.here, self.there)

    def back(self) -> float:
        return self._one(self.there, self.here)

    def _one(self, to: torch.Tensor, source: torch.Tensor) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start


def link_seconds(size_bytes: int, repeats: int) -> tuple[list[float], list[float]]:
    """So many copies each way over the link."""
    link = Link(size_bytes)
    out, back = zip(*(link.copy() for _ in range(repeats)), strict=True)
    return list(out), list(back)


def gpu_name() -> str:
    """Of the kept result's file."""
    if not torch.cuda.is_available():
        return "host"
    return "h200" if torch.cuda.get_device_name().endswith("H200") else "gpu"
