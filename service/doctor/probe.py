"""Asks this machine. Whatever is missing or refuses becomes a fact; nothing is raised, and no Ray is started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

from torpor.actors.limits import UNLIMITED, host_limit_bytes
from torpor.service.doctor.facts import (
    Facts,
    HostFacts,
    JournalFacts,
    RayFacts,
    TorchFacts,
)
from torpor.service.doctor.probe_driver import driver_facts
from torpor.service.doctor.probe_sleep import core_facts

Join = Callable[[str], str]  # a Ray cluster's address → why it cannot be joined, or nothing
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def probe(environment: Mapping[str, str], join: Join | None = None) -> Facts:
    return Facts(
        driver=driver_facts(),
        core=core_facts(),
        torch=torch_facts(),
        host=host_facts(),
        journal=journal_facts(environment),
        ray=ray_facts(environment, join or _join_ray),
        environment=dict(environment),
    )


def torch_facts() -> TorchFacts:
    """Read, not imported: that takes seconds, and may fail for the reasons that are looked for."""
    version = version_of("torch")
    spec = importlib.util.find_spec("torch")
    if not version or spec is None or spec.origin is None:
        return TorchFacts(version)
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    built = re.search(r"^cuda\b.*=\s*['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return TorchFacts(version, (int(built[1]), int(built[2])) if built else None)


def host_facts() -> HostFacts:
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = host_limit_bytes(None)
    return HostFacts(
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        huge_pages=_chosen(_HUGE_PAGES),
        limit_bytes=None if limit >= UNLIMITED else limit,
        shm_bytes=_size_of("/dev/shm"),
    )


def journal_facts(environment: Mapping[str, str]) -> JournalFacts:
    named = environment.get("TORPOR_JOURNAL__PATH", "~/.local/state/torpor/journal.db")
    folder = Path(named).expanduser().parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return JournalFacts(str(folder), os.access(folder, os.W_OK), filesystem_of(folder, _mounts()))


def ray_facts(environment: Mapping[str, str], join: Join) -> RayFacts:
    version, address = version_of("ray"), environment.get("RAY_ADDRESS", "")
    return RayFacts(version, address, join(address) if version and address else "")


def version_of(package: str) -> str:
    """Empty where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def filesystem_of(folder: Path, mounts: str) -> str:
    """mounts: /proc/mounts. The type of the last one mounted that the folder is in; empty if none is known."""
    folder, best, found = folder.resolve(), -1, ""
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        depth = len(Path(point).parts)
        if folder.is_relative_to(point) and depth >= best:
            best, found = depth, kind
    return found


def _mounts() -> str:
    try:
        return Path("/proc/mounts").read_text(encoding="utf-8")
    except OSError:
        return ""


def _chosen(path: Path) -> str | None:
    """The word in brackets."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text(encoding="ascii"))
    except OSError:
        return None
    return found[1] if found else None


def _size_of(folder: str) -> int | None:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize


def _join_ray(address: str) -> str:
    # Here, so that whoever has no cluster does not wait for Ray's import.
    from torpor.actors.cluster import NoCluster, connect

    try:
        connect(address=address).shutdown()
    except NoCluster as error:
        return str(error)
    return ""
