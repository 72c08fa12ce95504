"""The examples run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long
def test_a_trainer_and_a_model_take_turns_on_a_lent_group() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", EXAMPLES / "shared_gpu.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    freed = [int(size) for size in re.findall(r"trained in (\d+) MiB more", done.stdout)]
    assert len(freed) == 2
    assert min(freed) > 400, "weights and KV cache"
