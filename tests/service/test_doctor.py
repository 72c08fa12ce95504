"""`torpor doctor`: each check over facts of machines that have what it looks for, and one run on this machine."""

from __future__ import annotations

import json
import sys
import tomllib
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torpor.service.cli import main
from torpor.service.doctor import probe, software
from torpor.service.doctor.checks import CHECKS, examine
from torpor.service.doctor.facts import (
    CoreFacts,
    DriverFacts,
    Facts,
    Gpu,
    HostFacts,
    JournalFacts,
    RayFacts,
    TorchFacts,
)
from torpor.service.doctor.findings import Level
from torpor.service.doctor.probe_driver import driver_facts

GIB = 1 << 30
GPU = Gpu("H200", (9, 0), virtual_memory=True)
DRIVER = DriverFacts(1, "13.4.4", (13, 0), (GPU,))
CORE = CoreFacts("cuda", kernels="loaded")
HOST = HostFacts(memlock_bytes=None, huge_pages="madvise", limit_bytes=100 * GIB, shm_bytes=10 * GIB)
HEALTHY = Facts(
    DRIVER,
    CORE,
    TorchFacts("2.11.0", (13, 0)),
    HOST,
    JournalFacts("/var/lib/torpor", True, "ext4"),
    RayFacts(software.RAY_VERSION),
)
NO_GPU = replace(HEALTHY, driver=DriverFacts(), core=CoreFacts("host"), torch=TorchFacts("2.13.0+cpu"))
OLD_GPU = replace(GPU, name="V100", capability=(7, 0))


def environment(**variables: str) -> dict[str, Any]:
    return {"environment": variables}


def driver(**changes: Any) -> dict[str, Any]:
    return {"driver": replace(DRIVER, **changes)}


# check, level, what is other than on a healthy machine with a GPU, a word of what is found, a word of its mend
WRONG: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("driver", "fault", driver(version=None, gpus=()), "1 GPU(s)", "nvidia-smi"),
    ("driver", "fault", driver(gpus=(), error="CUDA_ERROR_NO_DEVICE"), "NO_DEVICE", "--gpus all"),
    ("driver", "fault", driver(version=(11, 8)), "11.8", "12.0 or later"),
    ("driver", "warning", driver(version=(12, 4)), "one by one", "13.0 or later"),
    ("driver", "warning", environment(CUDA_VISIBLE_DEVICES=""), "hides", "unset"),
    ("cuda-python", "warning", driver(bindings="", gpus=()), "not installed", "torpor[gpu]"),
    ("virtual memory", "fault", driver(gpus=(replace(GPU, virtual_memory=False),)), "H200", "another GPU"),
    ("compute mode", "fault", driver(gpus=(replace(GPU, compute_mode=2),)), "nobody", "-c DEFAULT"),
    ("compute mode", "warning", driver(gpus=(replace(GPU, compute_mode=3),)), "cannot share", "-c DEFAULT"),
    ("sleep and wake", "fault", {"core": CoreFacts("cuda", "cuMemMap: 999")}, "cuMemMap: 999", "nvidia-smi"),
    ("sleep and wake", "fault", {"core": CoreFacts("host", "no memfd")}, "no memfd", "memory limits"),
    (
        "sleep and wake",
        "warning",
        {"core": CoreFacts("cuda", "needed 4 MiB", full=True)},
        "no room",
        "sleep what",
    ),
    ("kernels", "warning", {"core": CoreFacts("cuda", kernels="built without nvcc")}, "without nvcc", "nvcc"),
    (
        "kernels",
        "warning",
        driver(gpus=(OLD_GPU,)) | {"core": CoreFacts("cuda", kernels="no image for it")},
        "V100 is older",
        "nvcc",
    ),
    ("kernels", "warning", {"core": CoreFacts("cuda", "cuMemMap: 999")}, "not known", "first"),
    ("torch", "fault", {"torch": TorchFacts()}, "not installed", "pip install torch"),
    ("torch", "fault", {"torch": TorchFacts("2.13.0+cpu")}, "CPUs alone", "for CUDA"),
    ("torch", "fault", driver(version=(12, 9)), "for 12.9", "newer driver"),
    ("memlock", "warning", {"host": replace(HOST, memlock_bytes=8 << 20)}, "8.0 MiB", "ulimit -l"),
    ("huge pages", "warning", {"host": replace(HOST, huge_pages="never")}, "never", "echo madvise"),
    ("huge pages", "warning", {"host": replace(HOST, huge_pages=None)}, "does not say", "echo madvise"),
    ("memory limit", "warning", {"host": replace(HOST, limit_bytes=GIB)}, "1.0 GiB", "host_pool.bytes"),
    ("/dev/shm", "warning", {"host": replace(HOST, shm_bytes=64 << 20)}, "64.0 MiB", "--shm-size"),
    ("/dev/shm", "warning", {"host": replace(HOST, shm_bytes=None)}, "not there", "--shm-size"),
    ("journal", "fault", {"journal": JournalFacts("/root", writable=False)}, "/root", "journal.path"),
    ("journal", "warning", {"journal": JournalFacts("/home/me", True, "nfs4")}, "nfs4", "local disk"),
    ("Ray", "fault", {"ray": RayFacts()}, "not installed", f"=={software.RAY_VERSION}"),
    ("Ray", "fault", {"ray": RayFacts("2.40.0")}, "2.40.0", "every node"),
    (
        "Ray cluster",
        "fault",
        {"ray": RayFacts(software.RAY_VERSION, "10.0.0.7:6379", "it has Ray 2.40.0")},
        "it has Ray 2.40.0",
        "RAY_ADDRESS",
    ),
    (
        "Ray cluster",
        "warning",
        {"ray": RayFacts(software.RAY_VERSION, "10.0.0.7:6379")},
        "RAY_AUTH_MODE is not set",
        "every node",
    ),
    (
        "expandable_segments",
        "fault",
        environment(PYTORCH_CUDA_ALLOC_CONF="backend:native, expandable_segments:True"),
        "PYTORCH_CUDA_ALLOC_CONF",
        "take expandable_segments out",
    ),
    ("torch's allocator", "fault", environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1"), "turns it off", "unset"),
    ("NCCL_GRAPH_REGISTER", "warning", driver(gpus=(GPU, GPU)), "default", "NCCL_GRAPH_REGISTER=0"),
    ("NCCL_GRAPH_REGISTER", "warning", environment(NCCL_GRAPH_REGISTER="1"), "1", "NCCL_GRAPH_REGISTER=0"),
    ("LD_PRELOAD", "warning", environment(LD_PRELOAD="/x/torch_memory_saver.so"), "before torpor", "leave"),
    ("CUDA_LAUNCH_BLOCKING", "warning", environment(CUDA_LAUNCH_BLOCKING="1"), "every kernel", "unset"),
]


@pytest.mark.parametrize(("check", "level", "changes", "found", "mend"), WRONG)
def test_what_is_in_the_way_is_found_and_its_mend_named(
    check: str, level: str, changes: dict[str, Any], found: str, mend: str
) -> None:
    finding = next(one for one in examine(replace(HEALTHY, **changes)) if one.check == check)
    assert finding.level == level
    assert found in finding.found
    assert mend in finding.mend


@pytest.mark.parametrize("facts", [HEALTHY, NO_GPU], ids=["gpu", "no gpu"])
def test_nothing_is_said_against_a_healthy_machine_with_or_without_a_gpu(facts: Facts) -> None:
    findings = examine(facts)
    assert [finding for finding in findings if finding.level is not Level.OK or finding.mend] == []
    assert len({finding.check for finding in findings}) == len(CHECKS)


def test_every_check_can_fail() -> None:
    assert {row[0] for row in WRONG} == {finding.check for finding in examine(HEALTHY)}


def test_two_gpus_are_well_once_graphs_register_nothing() -> None:
    facts = replace(HEALTHY, **driver(gpus=(GPU, GPU)), **environment(NCCL_GRAPH_REGISTER="0"))
    assert all(finding.level is Level.OK for finding in examine(facts))


class FakeDriver:
    """cuda.bindings.driver with one GPU; `refuses` is the call that does not succeed."""

    class CUresult:
        CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE = 0, 100

    class CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 9
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 0
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 1
        CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 3

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses

    def __getattr__(self, call: str) -> Any:
        answers = {
            "cuInit": (0,),
            "cuDriverGetVersion": (0, 13020),
            "cuDeviceGetCount": (0, 1),
            "cuDeviceGet": (0, "device"),
            "cuDeviceGetName": (0, b"H200" + bytes(60)),
        }
        if call == self.refuses:
            return lambda *_: (self.CUresult.CUDA_ERROR_NO_DEVICE, None)
        if call == "cuDeviceGetAttribute":
            return lambda key, _: (0, key)
        return lambda *_: answers[call]


def fake_bindings(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    bindings = types.ModuleType("cuda.bindings")
    vars(bindings).update(__version__="13.4.4", driver=driver)
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


def test_the_driver_is_asked_by_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_bindings(monkeypatch, FakeDriver())
    facts = driver_facts()
    assert facts.bindings == "13.4.4" and facts.version == (13, 2) and facts.error == ""
    assert facts.gpus == (Gpu("H200", (9, 0), virtual_memory=True, compute_mode=3),)


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGetAttribute"])
def test_a_driver_that_refuses_is_a_fact_and_no_error(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    fake_bindings(monkeypatch, FakeDriver(call))
    facts = driver_facts()
    assert facts.gpus == () and "the driver answers 100" in facts.error
    findings = examine(replace(HEALTHY, driver=replace(facts, device_files=1)))
    assert next(one for one in findings if one.check == "driver").level is Level.FAULT


def test_missing_cuda_python_is_a_fact_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    facts = driver_facts()
    assert facts.bindings == "" and "cuda-python" in facts.error


def test_a_cluster_is_joined_only_where_one_is_named() -> None:
    asked: list[str] = []

    def join(address: str) -> str:
        asked.append(address)
        return "nobody listens there"

    assert probe.ray_facts({}, join).error == "" and asked == []
    facts = probe.ray_facts({"RAY_ADDRESS": "10.0.0.7:6379"}, join)
    assert facts == RayFacts(software.RAY_VERSION, "10.0.0.7:6379", "nobody listens there")
    assert asked == ["10.0.0.7:6379"]


def test_the_file_system_of_a_folder_is_the_last_one_mounted_over_it(tmp_path: Path) -> None:
    mounts = f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n/dev/b {tmp_path}/in xfs rw 0 0\n"
    (tmp_path / "in").mkdir()
    assert probe.filesystem_of(tmp_path / "in", mounts) == "xfs"
    assert probe.filesystem_of(tmp_path / "inner", mounts) == "nfs4"
    assert probe.filesystem_of(Path("/etc"), mounts) == "ext4"


def test_a_journal_folder_that_is_not_there_yet_is_judged_by_the_nearest_one_above(tmp_path: Path) -> None:
    facts = probe.journal_facts({"TORPOR_JOURNAL__PATH": str(tmp_path / "a" / "b" / "journal.db")})
    assert facts.folder == str(tmp_path) and facts.writable and facts.filesystem


def test_the_pinned_ray_is_the_one_that_is_asked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"ray[default]=={software.RAY_VERSION}" in project["dependencies"]


def test_this_machine_is_examined_by_the_command_and_a_trap_set_for_it_is_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("TORPOR_JOURNAL__PATH", str(tmp_path / "journal.db"))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] and len(report["findings"]) == len(CHECKS)
    slept = next(one for one in report["findings"] if one["check"] == "sleep and wake")
    assert slept["level"] == "ok" and "slept and woke" in slept["found"]

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fault" in out
    assert "expandable_segments: take expandable_segments out of PYTORCH_ALLOC_CONF" in out


def test_a_dead_ray_address_is_one_line_and_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    cluster = next(one for one in report["findings"] if one["check"] == "Ray cluster")
    assert cluster["level"] == "fault" and "no Ray cluster can be joined at 127.0.0.1:1" in cluster["found"]
