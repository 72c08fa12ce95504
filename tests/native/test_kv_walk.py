"""Random walks over caches (kv_walk.py): short ones always, a million steps in `make test-long`."""

from __future__ import annotations

import os

import pytest
from support.kv_walk import walk
from support.kv_walks import LONG_STEPS, cores, run

STEPS = {"roomy": 4_000, "tight": 3_500, "partial": 2_500}


@pytest.mark.parametrize("kind", STEPS)
def test_a_random_walk_finds_every_page_as_the_model_has_it_k3_k11_k12_m3(kind: str) -> None:
    done = walk(20, kind, STEPS[kind])
    stats = done.kv.stats()
    assert min(done.counts.values()) > 5 and stats["hits_tokens"] > 0
    assert done.counts["faults"] > 20 and done.counts["maintain"] > 20
    assert kind == "roomy" or (stats["evicted_pages"] > 0 and stats["moved_in_pages"] > 0)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_a_million_random_steps_find_every_page_as_the_model_has_it_k3_k11_k12_m3() -> None:
    """TORPOR_WALK_STEPS, TORPOR_WALK_PROCESSES (default: one a core) and TORPOR_WALK_SEED choose otherwise."""
    steps = int(os.environ.get("TORPOR_WALK_STEPS", LONG_STEPS))
    processes = int(os.environ.get("TORPOR_WALK_PROCESSES", cores()))
    seed = os.environ.get("TORPOR_WALK_SEED")
    rows = run(steps, processes, int(seed) if seed else None)
    assert sum(row["steps"] for row in rows) == steps
