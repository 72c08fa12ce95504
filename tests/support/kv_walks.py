"""Many random walks (kv_walk.py) over several processes, and the record that is kept of them.

Needs no pytest: PYTHONPATH=build/py:tests python -m support.kv_walks --steps 1000000
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bench.record import command, machine
from support.kv_walk import walk

RESULT = Path(__file__).parents[1] / "bench" / "results" / "kv_walk.json"
LONG_STEPS = 1_000_000
KINDS = ("roomy", "tight", "partial")
SLICE_STEPS = 20_000  # of one walk; then a fresh cache with a seed of its own


def one(seed: int, kind: str, steps: int) -> dict[str, Any]:
    """In a process of its own: one walk, and what it met."""
    torch.set_num_threads(1)
    began = time.monotonic()
    done = walk(seed, kind, steps)
    return {
        "seed": seed,
        "kind": kind,
        "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
        "by_kind": done.counts,
        "stats": done.kv.stats(),
    }


def walks(first_seed: int, steps: int, processes: int) -> list[dict[str, Any]]:
    """So many steps in all, the kinds in turn, seeds from the first one on. The first fault found is raised."""
    sizes = [min(SLICE_STEPS, steps - begun) for begun in range(0, steps, SLICE_STEPS)]
    # Spawned: a device does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        jobs = [
            pool.submit(one, first_seed + number, KINDS[number % len(KINDS)], size)
            for number, size in enumerate(sizes)
        ]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def cores() -> int:
    return len(os.sched_getaffinity(0))


def run(steps: int, processes: int, seed: int | None) -> list[dict[str, Any]]:
    """Walks, and keeps what they met in RESULT; seed None: another one each time."""
    first = random.SystemRandom().randrange(1 << 30) if seed is None else seed
    commit = command("git", "rev-parse", "--short", "HEAD") or os.environ.get("TORPOR_COMMIT", "")
    print(f"seeds from {first} on", flush=True)
    began = time.monotonic()
    rows = walks(first, steps, processes)
    keep(RESULT, rows, time.monotonic() - began, processes, commit)
    return rows


def keep(path: Path, rows: list[dict[str, Any]], seconds: float, processes: int, commit: str) -> None:
    """The shape of bench/record.py, with one row a walk."""
    record = {
        "id": "kv_walk",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": machine() | {"python": platform.python_version()},
        "processes": processes,
        "seconds": round(seconds, 1),
        "steps": sum(row["steps"] for row in rows),
        "rows": rows,
        "notes": "Random walks over KV caches beside a model (tests/support/kv_walk.py); all of them passed.",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=LONG_STEPS)
    parser.add_argument("--processes", type=int, default=cores())
    parser.add_argument("--seed", type=int)
    chosen = parser.parse_args()
    rows = run(chosen.steps, chosen.processes, chosen.seed)
    print(f"{sum(row['steps'] for row in rows)} steps in {len(rows)} walks passed; see {RESULT}")


if __name__ == "__main__":
    main()
