"""The systemd unit: systemd itself reads it where there is one; its command is one that `torpor` takes."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torpor.service.ending import TOLD_S, EndTimes

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "torpor.service"
PROGRAM = "/opt/torpor/bin/torpor"


def read() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]  # keys as they are written
    parser.read_string(UNIT.read_text())
    return parser


def test_systemd_has_nothing_against_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("this machine has no systemd-analyze")
    copy = tmp_path / "torpor.service"
    copy.write_text(UNIT.read_text().replace(PROGRAM, sys.executable))
    verify = [program, "verify", "--man=no", "--recursive-errors=no", str(copy)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if copy.name in line]
    assert done.returncode == 0 and not said, said
    copy.write_text(copy.read_text().replace("TimeoutStopSec", "TimeoutStopSecs"))
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    assert "TimeoutStopSecs" in done.stderr + done.stdout, "it does look"


def test_the_unit_gives_the_service_the_time_to_end() -> None:
    service = read()["Service"]
    times = EndTimes()
    assert float(service["TimeoutStopSec"]) > times.notice_s + times.drain_s + TOLD_S + 60
    assert service["KillMode"] == "mixed", "Ray's processes would get the signal with the service"


def test_the_units_command_is_one_that_torpor_takes() -> None:
    program, *words = read()["Service"]["ExecStart"].split()
    assert program == PROGRAM
    missing = [sys.executable, "-m", "torpor.service.cli", *words]
    done = subprocess.run(missing, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "/etc/torpor/torpor.yaml: cannot be read" in done.stderr
