"""run.sh itself, with programs that only play cmake, ctest and Python: what is told and kept, whatever ends it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

PROGRAMS = {
    "nvidia-smi": "echo a GPU",
    "cmake": "echo cmake",
    "ctest": 'case "$*" in *" -E "*) echo began; exec sleep 60 ;; esac; echo ctest',
    "python3": 'case "$*" in *"-m pytest "*) echo one failed; exit 3 ;; esac; echo python',
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    script = tmp_path / "tests" / "gpu" / "run.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("run.sh"), script)
    results = tmp_path / "tests" / "bench" / "results"
    for folder in (tmp_path / "programs", results, tmp_path / "native", tmp_path / "build" / "gpu"):
        folder.mkdir(parents=True)
    (results / "table.json").write_text("{}")
    (tmp_path / "build" / "gpu" / "_core.so").touch()
    for name, what in PROGRAMS.items():
        program = tmp_path / "programs" / name
        program.write_text(f"#!/bin/sh\n{what}\n")
        program.chmod(0o755)
    return script


def started(run: Path, *words: str, **settings: str) -> subprocess.Popen[str]:
    root = run.parents[2]
    return subprocess.Popen(
        ["bash", str(run), *words],
        env=os.environ
        | {"PATH": f"{root / 'programs'}:{os.environ['PATH']}", "OUT": str(root / "out")}
        | settings,
        stdout=subprocess.PIPE,
        text=True,
    )


def kept(run: Path) -> set[str]:
    with tarfile.open(run.parents[2] / "out" / "all.tar.gz") as packed:
        return {name.removeprefix("./") for name in packed.getnames()}


def test_verbs_and_parts_run_in_one_call_and_a_failure_stops_no_other(run: Path) -> None:
    with started(run, "test", "pytest", "native-gpu", "bench", "p1") as script:
        said = script.communicate(timeout=60)[0]
    assert script.returncode == 1
    lines = said.splitlines()
    ends = [line.split(" after")[0] for line in lines[-4:]]
    assert ends == ["build: passed", "native-gpu: passed", "pytest: failed: status 3", "p1: passed"]
    assert "one failed" in lines
    assert {"build.log", "native-gpu.log", "pytest.log", "p1.log", "outcome.txt", "machine.txt"} <= kept(run)
    assert "results/table.json" in kept(run)


def test_what_is_cut_off_has_told_and_kept_what_was_done_before(run: Path) -> None:
    with started(run, "test", "native-gpu", "native-host", "bench") as script:
        log = run.parents[2] / "out" / "native-host.log"
        assert script.stdout is not None
        for line in script.stdout:
            if line.startswith("== native-gpu: passed"):
                break
        while not log.exists() or "began" not in log.read_text():
            assert script.poll() is None
            time.sleep(0.02)
        script.send_signal(signal.SIGTERM)
        lines = script.stdout.read().splitlines()
        assert script.wait(timeout=60) == 1
    assert lines[1].startswith("native-gpu: passed") and lines[2].startswith("native-host: failed: cut off")
    assert lines[3:] == [
        f"{name}: not run for lack of time" for name in ("p1", "p2", "p5", "p6", "p11", "p11-static")
    ]
    assert {"native-gpu.log", "native-host.log", "outcome.txt"} <= kept(run)


def test_a_part_without_time_does_not_begin_and_a_wrong_name_stops_all_before_it_does(run: Path) -> None:
    with started(run, "bench", "p1", TORPOR_LIMIT_S="25") as script:
        said = script.communicate(timeout=60)[0]
    assert script.returncode == 1
    assert said.splitlines()[-2:] == [f"{name}: not run for lack of time" for name in ("build", "p1")]
    for words in (["bench", "p0"], ["p1"], []):
        with started(run, *words) as script:
            assert script.wait(timeout=60) == 2


TWO = """
import time

def test_one():
    assert 1 == 2, "what went wrong"

def test_two():
    time.sleep(60)

def test_three():
    pass
"""


def under_plugin(folder: Path, text: str, **settings: str) -> subprocess.Popen[str]:
    (folder / "test_some.py").write_text(text)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-v", "-p", "gpu.at_once", "-p", "no:cacheprovider", str(folder)],
        env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | settings,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_why_a_test_failed_is_told_before_the_next_one_ends(tmp_path: Path) -> None:
    with under_plugin(tmp_path, TWO) as tests:
        assert tests.stdout is not None
        assert any("AssertionError: what went wrong" in line for line in tests.stdout)
        assert tests.poll() is None
        tests.kill()


def test_a_run_ends_with_its_summary_before_its_time_is_over(tmp_path: Path) -> None:
    with under_plugin(tmp_path, TWO.replace("60", "1.5"), TORPOR_PART_S="1") as tests:
        said = tests.communicate(timeout=60)[0]
    assert "no time is left" in said and "test_three" not in said
