"""The Dockerfile, without a container engine: hadolint reads it, and its steps are run in a plain folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
_NEEDS_ROOT = "apt-get "  # Debian's packages, which this machine has or has not


def instructions() -> list[tuple[str, str]]:
    """(KEYWORD, rest), lines that go on joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(keyword, rest) for keyword, rest in pairs]


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("hadolint is not installed: make setup")
    done = subprocess.run([program, str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_image_runs_without_rights_and_from_pinned_bases() -> None:
    read = instructions()
    last_user = [rest for keyword, rest in read if keyword == "USER"][-1]
    assert last_user == "10001:10001", "the chart's pods run as this user"
    check = next(rest for keyword, rest in read if keyword == "RUN")
    assert [run_plainly(check, DEVEL=devel, BASE="b@sha256:1") for devel in ("a", "a@sha256:0")] == [1, 0]
    assert "FROM ${BASE}\n" in DOCKERFILE.read_text()


def run_plainly(step: str, **variables: str) -> int:
    command = ["/bin/bash", "-o", "pipefail", "-euc", step]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, check=False).returncode


def copied(rest: str) -> Iterator[tuple[Path, str]]:
    *sources, target = rest.split()
    for source in sources:
        folder = source.endswith("/")
        yield ROOT / source, target if folder or not target.endswith("/") else target + Path(source).name


@pytest.mark.long
def test_the_steps_make_a_torpor_that_runs(tmp_path: Path) -> None:
    """In order, with the image's folders moved under one of ours. About a gigabyte of packages."""

    def moved(text: str) -> str:
        return re.sub(r"(?<![\w.])/(opt/torpor|src)\b", lambda match: f"{tmp_path}/{match[1]}", text)

    environment = os.environ | {"DEVEL": "a@sha256:0", "BASE": "b@sha256:0", "FLAVOUR": "cpu"}
    environment.pop("PYTHONPATH", None)
    where, run = tmp_path, 0
    for keyword, rest in instructions():
        rest = moved(rest)
        if keyword == "WORKDIR" and rest.startswith(str(tmp_path)):
            where = Path(rest)
            where.mkdir(parents=True)
        elif keyword == "COPY" and "--from" not in rest:
            for source, target in copied(rest):
                to = where / target
                to.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(
                        source, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "__pycache__")
                    )
                else:
                    shutil.copy(source, to)
        elif keyword == "ENV":
            environment["PATH"] = f"{tmp_path}/opt/torpor/bin:{environment['PATH']}"
        elif keyword == "RUN" and _NEEDS_ROOT not in rest:
            step = ["/bin/bash", "-o", "pipefail", "-euc", rest]
            done = subprocess.run(
                step, cwd=where, env=environment, capture_output=True, text=True, timeout=1500, check=False
            )
            assert done.returncode == 0, f"{rest}\n{done.stdout}{done.stderr}"
            run += 1
    assert run >= 5
    imported = subprocess.run(
        [f"{tmp_path}/opt/torpor/bin/python", "-c", "import torpor.native as n; print(n.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert imported.stdout.startswith(str(tmp_path)), "it is the image's own core that is loaded"
