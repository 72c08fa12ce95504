"""Random walks over hybrids (kv_walk.py): short ones always, a million steps in `make test-long`."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
from support.kv_walk import Walk

STEPS = 5_000
LONG_STEPS = 1_000_000
RESULTS = Path(__file__).parents[1] / "bench" / "results"


def run(seed: int, roomy: bool, steps: int) -> Walk:
    walk = Walk(seed, roomy)
    for number in range(steps):
        try:
            walk.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {number}") from error
    walk.end()
    return walk


@pytest.mark.parametrize("roomy", [True, False], ids=["roomy", "tight"])
def test_a_random_walk_finds_every_page_as_the_model_has_it_k3_k11(roomy: bool) -> None:
    walk = run(20, roomy, STEPS)
    stats = walk.kv.stats()
    assert min(walk.counts.values()) > 20 and stats["hits_tokens"] > 0
    assert roomy or (stats["evicted_pages"] > 0 and stats["moved_in_pages"] > 0)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_a_million_random_steps_find_every_page_as_the_model_has_it_k3_k11() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    steps = int(os.environ.get("TORPOR_WALK_STEPS", LONG_STEPS)) // 2
    print(f"seed {seed}")
    began = time.monotonic()
    rows = {}
    for name, roomy in (("roomy", True), ("tight", False)):
        walk = run(seed, roomy, steps)
        rows[name] = {"steps": steps, "by_kind": walk.counts, "stats": walk.kv.stats()}
    result = {"seed": seed, "seconds": round(time.monotonic() - began, 1), "walks": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "kv_walk.json").write_text(json.dumps(result, indent=2) + "\n")
