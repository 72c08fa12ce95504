"""Random faults, requests, deaths, crashes and cancellations, by seed; what must hold at every moment is looked at."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from schedule_runner import Tally, play, record

from torpor.actors.messages import Kind, OperationState

SEEDS = 2500
LONG_SEEDS = 100_000
RESULTS = Path(__file__).parents[2] / "bench" / "results"


def how_many(default: int) -> int:
    return int(os.environ.get("TORPOR_SCHEDULES", default))


def cores() -> int:
    return len(os.sched_getaffinity(0))


def assert_kept(tally: Tally) -> None:
    assert not tally.broken, f"{len(tally.broken)} of {tally.seeds}: " + "\n".join(tally.broken[:5])
    seen = {(kind, state) for kind, state, _ in tally.outcomes}
    assert seen == {(kind, state) for kind in Kind for state in OperationState} - {
        (kind, OperationState.RUNNING) for kind in Kind
    }, "every kind has ended in every way"


@pytest.mark.timeout(600)
def test_random_schedules_keep_the_promises() -> None:
    """C4, C6, G6, M6, F6, F8, F20, F25. TORPOR_SCHEDULES sets how many; a seed that breaks a promise is told."""
    # On half of the cores: other tests, some of which keep times, run beside it.
    assert_kept(play(range(how_many(SEEDS)), max(1, cores() // 2)))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_random_schedules_keep_the_promises() -> None:
    """As above, and what became of them is kept."""
    seeds, began_s = range(SEEDS, SEEDS + how_many(LONG_SEEDS)), time.perf_counter()
    tally = play(seeds, cores())
    result = record(seeds, tally, cores(), time.perf_counter() - began_s)
    (RESULTS / "schedules.json").write_text(json.dumps(result, indent=1) + "\n")
    assert_kept(tally)
