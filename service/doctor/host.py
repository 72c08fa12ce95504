"""Checks of the machine's memory, and of where the journal lies."""

from __future__ import annotations

from torpor.service.doctor.facts import Facts
from torpor.service.doctor.findings import Finding, fault, ok, warning
from torpor.service.units import show_bytes

MIB, GIB = 1 << 20, 1 << 30
DEFAULT_HOST_BYTES = 2 * GIB  # host tier and pool of `torpor serve` without a file
RAY_STORE_BYTES = 80 * MIB
_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "fuse.sshfs",
    "ceph",
    "glusterfs",
    "fuse.glusterfs",
    "lustre",
)


def memlock(facts: Facts) -> Finding:
    limit = facts.host.memlock_bytes
    if limit is None:
        return ok("memlock", "no limit")
    if not facts.has_gpu:
        return ok("memlock", f"{show_bytes(limit)}; host devices lock nothing")
    return warning(
        "memlock",
        f"{show_bytes(limit)}: CUDA page-locks memory beyond it on most machines, RDMA on none",
        "`ulimit -l unlimited`, LimitMEMLOCK=infinity for systemd, --ulimit memlock=-1 for containers",
    )


def huge_pages(facts: Facts) -> Finding:
    mode = facts.host.huge_pages
    if mode in ("always", "madvise"):
        return ok("huge pages", mode)
    return warning(
        "huge pages",
        "the kernel does not say" if mode is None else f"transparent huge pages: {mode}",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root: a first sleep that keeps contents takes "
        "its host memory many times faster then",
    )


def memory_limit(facts: Facts) -> Finding:
    limit = facts.host.limit_bytes
    if limit is None:
        return ok("memory limit", "none that is known")
    if limit < DEFAULT_HOST_BYTES:
        return warning(
            "memory limit",
            f"{show_bytes(limit)} for all ranks of this node, by its cgroups and the machine",
            f"raise the container's limit, or lower host_pool.bytes and kv_cache.host_bytes: by default they take up to "
            f"{show_bytes(DEFAULT_HOST_BYTES)}, and page-locked memory counts",
        )
    return ok("memory limit", f"{show_bytes(limit)} for what all ranks of this node keep")


def shared_memory(facts: Facts) -> Finding:
    size = facts.host.shm_bytes
    if size is not None and size >= RAY_STORE_BYTES:
        return ok("/dev/shm", show_bytes(size))
    return warning(
        "/dev/shm",
        "not there" if size is None else f"{show_bytes(size)}: too small for Ray's object store",
        "start the container with --shm-size=1g; in Kubernetes KubeRay does",
    )


def journal(facts: Facts) -> Finding:
    place = facts.journal
    if not place.writable:
        return fault(
            "journal",
            f"{place.folder} cannot be written by this user",
            "give the user that folder, or set journal.path (TORPOR_JOURNAL__PATH)",
        )
    if place.filesystem in _NETWORK:
        return warning(
            "journal",
            f"{place.folder} is on {place.filesystem}: locks there may not hold, and decisions may be lost",
            "set journal.path (TORPOR_JOURNAL__PATH) to a local disk",
        )
    return ok("journal", f"{place.folder} ({place.filesystem or 'unknown file system'})")
