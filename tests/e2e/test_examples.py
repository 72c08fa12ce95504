"""The examples run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str) -> str:
    """What it prints. Its memory and its Ray are its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", EXAMPLES / name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_trainer_learns_in_the_memory_that_the_model_has_given_back() -> None:
    """C9, C10, M1: refused while the model is awake, a real step while it sleeps, and the model says what was learnt."""
    said = run_example("rl_loop.py")
    assert "awake: 8 MiB free, training needs 16 MiB: refused" in said
    rounds = re.findall(
        r"reward (\S+), loss (\S+), trained in the (\d+) MiB freed, weights version (\d+)", said
    )
    assert [version for *_, version in rounds] == ["2", "3", "4", "5", "6"]
    assert {freed for *_, freed, _ in rounds} == {"54"}
    after = re.search(r"after: reward (\S+),", said)
    assert after is not None
    rewards = [float(reward) for reward, *_ in rounds] + [float(after[1])]
    assert rewards[0] < 0.15, "as often as chance has it"
    assert rewards[-1] > 0.5, rewards


@pytest.mark.long
def test_a_trainer_and_a_model_take_turns_on_a_lent_group() -> None:
    freed = [int(size) for size in re.findall(r"trained in (\d+) MiB more", run_example("shared_gpu.py"))]
    assert len(freed) == 2
    assert min(freed) > 400, "weights and KV cache"
