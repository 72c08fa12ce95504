"""Rounds of sleep and wake over all subjects in turns, and the rows that they come to."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torpor.actors.limits import Read, host_limit_bytes, read_text
from torpor.native import Device, TorporError, cuda_device_count
from torpor.service.bench.errors import BenchError
from torpor.service.bench.subjects import DriverMemory, HostCopy, KernelMemory, Subject, Torpor
from torpor.service.units import show_bytes

_SPARE_BYTES = 64 << 20
_HOST_SHARES = {"host": 6, "cuda": 2}  # of the machine's memory, in sizes: all subjects are there at once
WARM_UP = 1  # rounds that make host memory and are not counted


@dataclass
class Row:
    """what: discard (nothing is kept) or preserve. Seconds of each counted round."""

    what: str
    who: str
    subject: Subject
    sleep_s: list[float] = field(default_factory=list)
    wake_s: list[float] = field(default_factory=list)

    def play(self, counts: bool) -> None:
        began_s = time.perf_counter()
        self.subject.sleep()
        slept_s = time.perf_counter()
        self.subject.wake()
        woken_s = time.perf_counter()
        if counts:
            self.sleep_s.append(slept_s - began_s)
            self.wake_s.append(woken_s - slept_s)

    def record(self, size_bytes: int) -> dict[str, Any]:
        pairs = [slept + woken for slept, woken in zip(self.sleep_s, self.wake_s, strict=True)]
        times = {"sleep": self.sleep_s, "wake": self.wake_s, "pair": pairs}
        spread = {
            f"{name}_s": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
            for name, seconds in times.items()
        }
        return {"what": self.what, "who": self.who, "size_bytes": size_bytes, "rounds": len(pairs), **spread}


def pick_device(kind: str) -> str:
    """kind: auto, host or cuda. Raises BenchError."""
    if kind not in ("auto", "host", "cuda"):
        raise BenchError(f"--device {kind}: known are auto, host and cuda")
    if kind == "auto":
        return "cuda" if cuda_device_count() else "host"
    if kind == "cuda" and not cuda_device_count():
        raise BenchError("--device cuda: there is no usable NVIDIA GPU here; see `torpor doctor`")
    return kind


def measure(
    kind: str, size_bytes: int, rounds: int, played: Callable[[int], None] = lambda done: None
) -> list[dict[str, Any]]:
    """One record a row. kind: host or cuda. played: told how many rounds are over, of WARM_UP + rounds.

    Raises BenchError, before it takes memory that the machine does not have.
    """
    needed_bytes, free_bytes = _HOST_SHARES[kind] * size_bytes, available_bytes()
    if needed_bytes > free_bytes:
        raise BenchError(
            f"--size: the subjects would take {show_bytes(needed_bytes)} of the machine's memory together, "
            f"and {show_bytes(free_bytes)} are there; give less"
        )
    try:
        with _rows(kind, size_bytes) as rows:
            for done in range(WARM_UP + rounds):
                # In another order each time, so that none always follows the same one.
                for row in (*rows[done % len(rows) :], *rows[: done % len(rows)]):
                    row.play(counts=done >= WARM_UP)
                played(done + 1)
            _check(rows)
            return [row.record(size_bytes) for row in rows]
    except (TorporError, MemoryError, OSError, RuntimeError) as error:
        raise BenchError(f"{error}; measure less memory with --size, or free some") from error


def available_bytes(read: Read = read_text) -> int:
    """What may be taken of the machine's memory without harm to others."""
    free = [
        int(line.split()[1]) * 1024
        for line in (read("/proc/meminfo") or "").splitlines()
        if line.startswith("MemAvailable:")
    ]
    return min(host_limit_bytes(None, read), *free)


@contextmanager
def _rows(kind: str, size_bytes: int) -> Iterator[list[Row]]:
    rows: list[Row] = []
    try:
        for what, who, make in _makers(kind, size_bytes):
            rows.append(Row(what, who, make()))
        yield rows
    finally:
        for row in rows:
            row.subject.close()


def _makers(kind: str, size_bytes: int) -> Sequence[tuple[str, str, Callable[[], Subject]]]:
    if kind == "cuda":
        gpu = Device.cuda(0)
        return (
            ("discard", "torpor", lambda: Torpor(gpu, size_bytes, "none")),
            ("discard", "limit: driver", lambda: DriverMemory(size_bytes, kept=False)),
            ("preserve", "torpor", lambda: Torpor(gpu, size_bytes, "pinned")),
            ("preserve", "limit: driver, copy", lambda: DriverMemory(size_bytes, kept=True)),
        )
    host = Device.host(f"bench-{os.getpid()}", 2 * size_bytes + _SPARE_BYTES)
    return (
        ("discard", "torpor", lambda: Torpor(host, size_bytes, "none")),
        ("discard", "limit: kernel", lambda: KernelMemory(size_bytes)),
        ("preserve", "torpor", lambda: Torpor(host, size_bytes, "pinned")),
        ("preserve", "limit: kernel, copy", lambda: HostCopy(size_bytes)),
    )


def _check(rows: Sequence[Row]) -> None:
    for row in rows:
        if row.what == "preserve" and isinstance(row.subject, Torpor) and not row.subject.kept():
            raise BenchError("what was kept came back otherwise; nothing here is to be believed")
