"""spin looks at every state that the protocol's model can reach, and finds the fault in models that have one.

Needs spin (Debian's package `spin`) and gcc; without spin the tests skip, unless TORPOR_REQUIRE_SPIN is set.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "sleep_wake.pml"
BUDGETS = (
    "CRASHES",
    "RANK_FAULTS",
    "LOSSES",
    "DOUBLES",
    "REFUSALS",
    "MISMATCHES",
    "REQUESTS",
    "JOURNAL_LOSSES",
)
LIMIT_S = 120
MEMORY_MIB = 2048
ADVICE = "spin is missing: install it (Debian's package spin) to check the protocol's model"

# What may go wrong together, in a space that can be searched whole.
SEARCHES = {
    "a coordinator's and a rank's death": {
        "OPERATIONS": 1,
        "CRASHES": 1,
        "RANK_FAULTS": 1,
        "LOSSES": 1,
        "REFUSALS": 1,
    },
    "messages lost, late and doubled": {
        "OPERATIONS": 1,
        "LOSSES": 1,
        "DOUBLES": 1,
        "REFUSALS": 1,
        "MISMATCHES": 1,
        "REQUESTS": 1,
    },
    "a journal that is lost with the coordinator": {
        "OPERATIONS": 1,
        "CRASHES": 1,
        "JOURNAL_LOSSES": 1,
        "LOSSES": 1,
        "REFUSALS": 1,
    },
    "two operations": {"OPERATIONS": 2, "REQUESTS": 1},
}

FAULTY = {
    "COMMIT_BEFORE_DECISION": {"OPERATIONS": 1},
    "LEADER_OPENS_WITH_THE_OTHERS": {"OPERATIONS": 1},
    "REOPEN_WITH_THE_ABORT": {"OPERATIONS": 1, "REFUSALS": 1},
    "FORGETS_THE_JOURNAL": {"OPERATIONS": 1, "CRASHES": 1},
    "LEASE_ENDS_A_STAGE": {"OPERATIONS": 1},
    "OLD_DRAINS_OVERTAKE": {"OPERATIONS": 2},
    "FAILED_STAGES_RESUME": {"OPERATIONS": 1, "REFUSALS": 1, "REQUESTS": 1},
    "LATE_ABORTS_RESUME": {"OPERATIONS": 2, "REFUSALS": 2, "REQUESTS": 1},
    "STATUS_TELLS_NO_EPOCH": {"OPERATIONS": 1, "CRASHES": 1, "REFUSALS": 1, "JOURNAL_LOSSES": 1},
    "STATUS_TELLS_NO_DIGEST": {"OPERATIONS": 1, "LOSSES": 1, "MISMATCHES": 1},
    "LOST_WITHDRAWALS_END": {"OPERATIONS": 1, "RANK_FAULTS": 1, "REFUSALS": 1},
    "GATES_ARE_NOT_ASKED": {"OPERATIONS": 1, "CRASHES": 1, "REFUSALS": 1, "JOURNAL_LOSSES": 1},
}


def _spin() -> str:
    found = shutil.which("spin")
    if found is None:
        if os.environ.get("TORPOR_REQUIRE_SPIN"):
            pytest.fail(ADVICE)
        pytest.skip(ADVICE)
    return found


def _search(folder: Path, budgets: dict[str, int], mutation: str = "") -> str:
    """What the verifier says. Every budget that is not named is 0."""
    defines = [f"-D{name}={budgets.get(name, 0)}" for name in BUDGETS]
    defines.append(f"-DOPERATIONS={budgets['OPERATIONS']}")
    if mutation:
        defines.append(f"-D{mutation}")
    compile_ = ["gcc", "-O0", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}", "-o", "pan", "pan.c"]
    commands = ([_spin(), *defines, "-a", str(MODEL)], compile_, ["./pan", "-m100000"])
    for command in commands:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("name", SEARCHES)
def test_no_state_that_can_be_reached_breaks_a_promise(tmp_path: Path, name: str) -> None:
    """C6, M6, M7, G1: gate, ranks, journal and outcome agree in every order of events, and every operation ends."""
    said = _search(tmp_path, SEARCHES[name])
    assert re.search(r"errors: 0\b", said), said
    for sign in ("Search not completed", "max search depth too small", "out of memory"):
        assert sign not in said, said
    states = re.search(r"(\d+)\s+states, stored", said)
    assert states and int(states[1]) > 10_000, "a model that does nothing breaks nothing"


@pytest.mark.parametrize("mutation", FAULTY)
def test_a_protocol_with_a_fault_is_found_out(tmp_path: Path, mutation: str) -> None:
    said = _search(tmp_path, FAULTY[mutation], mutation)
    assert re.search(r"errors: 1\b", said) and "assertion violated" in said, said
