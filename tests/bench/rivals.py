"""What users of sleep and wake have today, measured in processes of their own, so that no allocator meets another.

    python tests/bench/rivals.py SUBJECT --gib 16 --tensors 1 --keep pinned --pause 1

prints one JSON object a cycle: {"case", "sleep_s", "wake_s"}. Subjects: `memory_saver` (torch_memory_saver by
LD_PRELOAD, its default), `memory_saver_retain` (its best setting for contents that do not change), `cpu_copy`
(`tensor.cpu()` and back), `checkpoint` (the driver's own process checkpoint; the child holds the memory).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import Result

GIB = 1 << 30
CYCLES = 3  # some of them take ten seconds each


@dataclass(frozen=True)
class Load:
    """What sleeps: bytes in so many tensors; `keep` is none or pinned; seconds asleep and between cycles."""

    size_bytes: int
    tensors: int = 1
    keep: str = "pinned"
    pause_s: float = 1.0

    def words(self) -> list[str]:
        return [
            f"--bytes={self.size_bytes}",
            f"--tensors={self.tensors}",
            f"--keep={self.keep}",
            f"--pause={self.pause_s}",
        ]


def name_of(subject: str) -> str:
    if subject.startswith("memory_saver"):
        setting = ", backup retained" if subject.endswith("retain") else ""
        return f"torch_memory_saver {importlib.metadata.version('torch_memory_saver')}{setting}"
    return {"cpu_copy": "tensor.cpu()", "checkpoint": "cuCheckpointProcess"}[subject]


def there(subject: str) -> bool:
    return (
        not subject.startswith("memory_saver") or importlib.util.find_spec("torch_memory_saver") is not None
    )


def cycles_of(subject: str, load: Load) -> Iterator[dict[str, float]]:
    """Runs the subject in a process of its own. RuntimeError with its last words when it fails."""
    environment = dict(os.environ)
    if subject.startswith("memory_saver"):
        spec = importlib.util.find_spec("torch_memory_saver")
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent.parent
        environment["LD_PRELOAD"] = str(folder / "torch_memory_saver_hook_mode_preload_cu13.abi3.so")
    run = subprocess.run(
        [sys.executable, __file__, subject, *load.words()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if run.returncode != 0:
        raise RuntimeError(f"{subject}: {run.stderr[-600:]}")
    for line in run.stdout.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def measure(result: Result, subject: str, load: Load, case: str) -> None:
    """Rows of the subject: its first cycle, which makes what it keeps, and the later ones. A rival that is not installed
    or fails says so in the notes, and has no rows."""
    if not there(subject):
        result.notes += f"; {subject}: not installed here"
        return
    try:
        for number, one in enumerate(cycles_of(subject, load)):
            row = f"{case}, {'later' if number else 'first cycle'}"
            for metric, seconds in (*one.items(), ("pair_s", one["sleep_s"] + one["wake_s"])):
                result.add(name_of(subject), row, metric, "s", seconds)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        result.notes += f"; {subject}, {case}: {error}"


def timed(work: Callable[[], Any]) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def report(load: Load, sleep: Callable[[], Any], wake: Callable[[], Any]) -> None:
    for _ in range(CYCLES):
        time.sleep(load.pause_s)
        slept = timed(sleep)
        time.sleep(load.pause_s)
        print(json.dumps({"sleep_s": slept, "wake_s": timed(wake)}), flush=True)


def tensors_of(load: Load) -> list[Any]:
    import torch

    each = load.size_bytes // load.tensors
    return [torch.ones(each, dtype=torch.uint8, device="cuda") for _ in range(load.tensors)]


def memory_saver(load: Load, retain: bool) -> None:
    from torch_memory_saver import torch_memory_saver as saver

    with saver.region(tag="all", enable_cpu_backup=load.keep != "none"):
        kept = tensors_of(load)
    if retain:
        saver.retain_cpu_backup = True
    report(load, lambda: saver.pause("all"), lambda: saver.resume("all"))
    if load.keep != "none":
        assert all(int(one[-1]) == 1 for one in kept)


def cpu_copy(load: Load) -> None:
    import torch

    tensors = tensors_of(load)
    away: list[Any] = []

    def sleep() -> None:
        away.extend(one.cpu() for one in tensors)
        tensors.clear()
        torch.cuda.empty_cache()

    def wake() -> None:
        tensors.extend(one.cuda() for one in away)
        away.clear()

    report(load, sleep, wake)


def checkpoint(load: Load) -> None:
    from cuda.bindings import driver

    def call(result: tuple[Any, ...]) -> None:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"process checkpoint: {result[0]!r}")

    call(driver.cuInit(0))
    child = subprocess.Popen(
        [sys.executable, __file__, "hold", *load.words()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline().strip() == "there"
        for _ in range(CYCLES):
            time.sleep(load.pause_s)
            start = time.perf_counter()
            call(driver.cuCheckpointProcessLock(child.pid, driver.CUcheckpointLockArgs()))
            call(driver.cuCheckpointProcessCheckpoint(child.pid, driver.CUcheckpointCheckpointArgs()))
            slept = time.perf_counter() - start
            time.sleep(load.pause_s)
            start = time.perf_counter()
            call(driver.cuCheckpointProcessRestore(child.pid, driver.CUcheckpointRestoreArgs()))
            call(driver.cuCheckpointProcessUnlock(child.pid, driver.CUcheckpointUnlockArgs()))
            print(json.dumps({"sleep_s": slept, "wake_s": time.perf_counter() - start}), flush=True)
    finally:
        child.kill()
        child.wait()


def hold(load: Load) -> None:
    kept = tensors_of(load)
    print("there", flush=True)
    sys.stdin.read()
    del kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("subject")
    parser.add_argument("--bytes", type=int, default=16 * GIB)
    parser.add_argument("--tensors", type=int, default=1)
    parser.add_argument("--keep", default="pinned")
    parser.add_argument("--pause", type=float, default=1.0)
    options = parser.parse_args()
    load = Load(options.bytes, options.tensors, options.keep, options.pause)
    if options.subject.startswith("memory_saver"):
        memory_saver(load, options.subject.endswith("retain"))
    else:
        {"cpu_copy": cpu_copy, "checkpoint": checkpoint, "hold": hold}[options.subject](load)


if __name__ == "__main__":
    main()
