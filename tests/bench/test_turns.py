"""What the GPU benchmarks rest on, with programs that only play subjects: whose memory is where, and what fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SIZE_BYTES = 1 << 30
TOTAL_BYTES = 4 << 30
# Its "device" is a folder: the bytes that a process has are in the file with its number.
PLAYER = """
import json, os, pathlib, sys
folder, kind, load = pathlib.Path(__file__).parent, sys.argv[1], json.loads(sys.argv[2])
mine = folder / f"{os.getpid()}.bytes"
def take(size): mine.write_text(str(size))
print("{}", flush=True)
for line in sys.stdin:
    what = json.loads(line)["do"]
    answer = {"seconds": 0.25}
    if what in ("load", "wake"):
        take(load["size_bytes"])
    if what == "wake" and kind == "dies":
        mine.unlink()
        sys.exit("no more memory here")
    if what == "wake" and kind == "complains":
        answer = {"error": "wake: it was refused"}
    if what == "sleep":
        asleep = (folder / "slept").exists()
        take(load["size_bytes"] if kind == "keeps" and asleep else 0)
        if kind == "keeps":
            (folder / "slept").touch()
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HERE))
    import load
    import record
    import turns

    program = tmp_path / "player.py"
    program.write_text(PLAYER)

    def free_bytes() -> int:
        alive = (one for one in tmp_path.glob("*.bytes") if Path(f"/proc/{one.stem}").exists())
        return TOTAL_BYTES - sum(int(one.read_text() or 0) for one in alive)

    monkeypatch.setattr(turns, "GIVEN_BACK_S", 0.05)
    made = turns.Turns(record.Result("P0"), free_bytes, program)
    return made, lambda name, kind: turns.Entry(name, kind, load.Load(SIZE_BYTES))


def play(stage: Any, *kinds: str) -> Any:
    turns, entry = stage
    with turns.playing([entry(kind, kind) for kind in kinds]):
        turns.load()
        for player in turns.shuffled(1):
            with turns.turn(player):
                wake_s = player.seconds("wake")
                sleep_s = player.seconds("sleep")
                turns.all_free(player)
                turns.add_pair(player.entry, "once", sleep_s, wake_s)
    return turns


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("keeps", f"keeps: {SIZE_BYTES} bytes of the device were not given back"),
        ("dies", "dies: wake: its process ended; no more memory here"),
        ("complains", "complains: wake: it was refused"),
    ],
)
def test_a_subject_that_fails_is_told_of_and_the_others_play_on(stage: Any, kind: str, said: str) -> None:
    turns = play(stage, kind, "torpor")
    assert turns.failures == [said]
    assert said in turns.result.notes
    assert {row["subject"] for row in turns.result.rows()} == {"torpor"}
    assert turns.free_bytes() == TOTAL_BYTES, "the processes should have ended"


def test_a_run_in_which_a_subject_of_ours_fails_does_not_succeed(stage: Any, tmp_path: Path) -> None:
    turns = play(stage, "torpor", "rival")
    assert turns.conclude(tmp_path, "here") == 0
    kept = json.loads((tmp_path / "P0-here.json").read_text())
    assert {row["metric"]: row["samples"] for row in kept["rows"] if row["subject"] == "rival"} == {
        "sleep_s": [0.25],
        "wake_s": [0.25],
        "pair_s": [0.5],
    }
    turns.failures.append("torpor, 291 tensors: sleep: it was refused")
    assert turns.conclude(tmp_path, "here") == 1


def test_a_models_tensors_are_as_many_and_as_large_together_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    import load

    sizes = load.Load(64 << 30, load.MODEL_TENSORS).sizes()
    assert len(sizes) == 291 and all(size % 512 == 0 for size in sizes)
    assert 0 <= (64 << 30) - sum(sizes) < 291 * 512
    assert min(sizes) < 1 << 20 < 1 << 30 < max(sizes), "a real model has both norms and embeddings"


@pytest.mark.long
def test_the_benchmark_of_weights_runs_on_host_devices(tmp_path: Path) -> None:
    words = ["--json", str(tmp_path), "--host", "8", "--seconds", "1"]
    subprocess.run([sys.executable, str(HERE / "p2_weights.py"), *words], check=True, timeout=120)
    kept = json.loads((tmp_path / "P2-host.json").read_text())
    assert {row["case"] for row in kept["rows"]} >= {"first cycle", "unchanged since"}
