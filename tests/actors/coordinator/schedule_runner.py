"""Plays many random schedules, spread over processes, and keeps what became of them. Needs pydantic and no Ray.

    PYTHONPATH=build/py python tests/actors/coordinator/schedule_runner.py --first 0 --count 100000 --json FILE

A seed that breaks a promise is told, and played again alone by `--first SEED --count 1`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from coordinator_virtual_time import run
from schedule import Schedule

CHUNK = 50  # seeds that a process plays before it asks for more
TOLD = 20  # broken seeds that are told


@dataclass
class Tally:
    """What became of the operations of some seeds: (kind, state, code) → how many. broken: what should not have been."""

    seeds: int = 0
    outcomes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    virtual_s: float = 0.0

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.outcomes.update(other.outcomes)
        self.broken.extend(other.broken)
        self.virtual_s += other.virtual_s

    def by_kind(self) -> dict[str, dict[str, int]]:
        told: dict[str, dict[str, int]] = {}
        for (kind, state, code), count in sorted(self.outcomes.items()):
            told.setdefault(kind, {})[f"{state}: {code}" if code else state] = count
        return told


def unseen(broken: list[str], context: dict[str, Any]) -> None:
    """An error that no one has heard of; a rank that never answers is dropped as it hangs, which is none."""
    if "exception" in context:
        broken.append(f"unseen: {context['exception']!r} in {context.get('future')}")


def play_one(seed: int) -> Tally:
    """Never raises: what goes wrong is told with its seed."""
    tally = Tally(1)

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        schedule = Schedule(seed)
        broken = schedule.watcher.broken
        loop.set_exception_handler(lambda _, context: unseen(broken, context))
        try:
            await schedule.play()
            for outcome in await schedule.settle():
                tally.outcomes[outcome.kind, outcome.state, outcome.code or ""] += 1
        finally:
            await schedule.rig.stop()
            tally.virtual_s = loop.time()
        if broken:
            tally.broken.append(f"seed {seed}: " + "; ".join(broken[:5]))

    try:
        run(whole())
    except Exception as error:
        tally.broken.append(f"seed {seed}: {type(error).__name__}: {error}")
    return tally


def play_some(seeds: Sequence[int]) -> Tally:
    logging.disable(logging.CRITICAL)  # what is lost and refused here is so by intent
    tally = Tally()
    for seed in seeds:
        tally.add(play_one(seed))
    return tally


def play(seeds: range, workers: int) -> Tally:
    """In this process when one is enough."""
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    tally = Tally()
    if workers == 1:
        for chunk in chunks:
            tally.add(play_some(chunk))
        return tally
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for each in pool.map(play_some, chunks):
            tally.add(each)
            if each.broken:  # told at once: the rest may take an hour
                print(f"after {tally.seeds} seeds:", *each.broken, sep="\n", file=sys.stderr, flush=True)
    return tally


def record(seeds: range, tally: Tally, workers: int, wall_s: float) -> dict[str, Any]:
    """The shape of tests/bench/record.py, as far as it fits."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    from record import command, machine

    return {
        "id": "schedules",
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("TORPOR_COMMIT") or command("git", "rev-parse", "--short", "HEAD"),
        "machine": {**machine(), "python": sys.version.split()[0]},
        "seeds": {"first": seeds.start, "count": len(seeds)},
        "workers": workers,
        "wall_s": round(wall_s, 1),
        "virtual_s": round(tally.virtual_s),
        "operations": sum(tally.outcomes.values()),
        "outcomes": tally.by_kind(),
        "broken": tally.broken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    seeds, began_s = range(options.first, options.first + options.count), time.perf_counter()
    tally = play(seeds, options.workers)
    result = record(seeds, tally, options.workers, time.perf_counter() - began_s)
    print(json.dumps({**result, "broken": tally.broken[:TOLD]}, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if tally.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
