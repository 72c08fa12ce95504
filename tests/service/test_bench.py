"""`torpor bench` on a host device: figures beside their limit, and refusals before memory is taken."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from torpor.native import Device
from torpor.service.bench.errors import BenchError
from torpor.service.bench.rounds import Row, available_bytes, measure
from torpor.service.bench.subjects import HostCopy, KernelMemory, Torpor
from torpor.service.cli import main

MIB = 1 << 20
SIZE = 8 * MIB


def test_it_prints_a_row_for_each_subject_and_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--size", "4MiB", "--rounds", "2", "--device", "host"]) == 0
    out, err = capsys.readouterr()
    assert [line.split("  ")[0] for line in out.splitlines()[2:]] == [
        "discard",
        "discard",
        "preserve",
        "preserve",
    ]
    assert err == ""


def test_its_json_has_seconds_of_all_counted_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--size", "4MiB", "--rounds", "3", "--device", "host", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["size_bytes"]) == ("host", 4 * MIB)
    for row in report["rows"]:
        assert row["rounds"] == 3
        for name in ("sleep_s", "wake_s", "pair_s"):
            assert 0 < row[name]["min"] <= row[name]["median"] <= row[name]["max"]


@pytest.mark.parametrize("mode", ["none", "pinned"])
def test_its_memory_is_really_given_back_and_what_it_keeps_comes_back_m1_k3(mode: str) -> None:
    device = Device.host(f"bench-test-{os.getpid()}-{mode}", 2 * SIZE)
    subject = Torpor(device, SIZE, mode)
    assert device.memory_info()[0] == SIZE
    subject.sleep()
    assert device.memory_info()[0] == 2 * SIZE
    subject.wake()
    assert device.memory_info()[0] == SIZE
    assert subject.kept() == (mode == "pinned")
    subject.close()
    assert device.memory_info()[0] == 2 * SIZE


def test_the_limits_commit_and_release_their_memory_themselves() -> None:
    """By the kernel's word: a limit that left it mapped would be faster than can be."""
    for subject in (KernelMemory(64 * MIB), HostCopy(64 * MIB)):
        subject.sleep()
        asleep = resident_bytes()
        subject.wake()
        if isinstance(subject, HostCopy):
            assert resident_bytes() - asleep > 60 * MIB
        subject.close()
    files = open_files()
    KernelMemory(SIZE).close()
    assert open_files() == files


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--size", "much"), 2, "512MiB"),
        (("--size", "4KiB"), 2, "below 1 MiB"),
        (("--size", "900TiB"), 1, "are there; give less"),
        (("--rounds", "0"), 2, "--rounds"),
        (("--device", "tpu"), 1, "known are auto, host and cuda"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_memory_is_taken(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, says: str
) -> None:
    assert main(["bench", "--device", "host", *arguments]) == code
    assert says in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_what_is_there_is_the_lowest_of_what_is_free_and_what_is_allowed() -> None:
    def machine(free_kib: int, limit: int) -> int:
        texts = {
            "/proc/meminfo": f"MemTotal: 1000000 kB\nMemAvailable: {free_kib} kB\n",
            "/sys/fs/cgroup/memory.max": str(limit),
        }
        return available_bytes(texts.get)

    assert machine(500_000, 1 << 40) == 500_000 * 1024
    assert machine(500_000, 100 << 20) == int((100 << 20) * 0.9)


def test_contents_that_came_back_otherwise_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Torpor, "kept", lambda self: False)
    with pytest.raises(BenchError, match="nothing here is to be believed"):
        measure("host", MIB, 1)


def test_the_round_that_makes_host_memory_is_not_counted() -> None:
    row = Row("discard", "torpor", KernelMemory(MIB))
    row.play(counts=False)
    row.play(counts=True)
    assert len(row.sleep_s) == len(row.wake_s) == 1
    row.subject.close()
