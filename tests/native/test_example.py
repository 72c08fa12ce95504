"""The example for engine authors runs as it is printed in the README, in at most 60 lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "native_engine.py"


def test_the_example_frees_memory_and_finds_weights_and_prefix_again_k3_s1() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "asleep: 24 MiB given back, 64 MiB free",
        "awake: weights whole: True, known prefix: 96",
    ]
