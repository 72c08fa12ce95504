"""How much memory a node's processes may have together: cgroups (v1 and v2) and the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63
RESERVE_FRACTION = 0.1
_V2 = ("/sys/fs/cgroup", "memory.max")
_V1 = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
Read = Callable[[str], str | None]


def read_text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None


def host_limit_bytes(configured: int | None, read: Read = read_text) -> int:
    """What all ranks of a node may keep: as configured, or the lowest limit of this process's node less a tenth."""
    if configured is not None:
        return configured
    known = [limit for limit in (*_cgroup_limits(read), *_machine(read)) if limit < UNLIMITED]
    return int(min(known) * (1 - RESERVE_FRACTION)) if known else UNLIMITED


def _cgroup_limits(read: Read) -> Iterator[int]:
    """Of this process's groups, and of all that they are in: each one binds."""
    for root, name, group in _groups(read):
        for folder in (PurePosixPath(group), *PurePosixPath(group).parents):
            text = read(str(PurePosixPath(root, str(folder).lstrip("/"), name)))
            if text is not None and text.strip().isdecimal():
                yield int(text)


def _groups(read: Read) -> Iterator[tuple[str, str, str]]:
    """(where its kind is mounted, the limit's file, the group). In a container the root is the group itself."""
    yield (*_V2, "/")
    yield (*_V1, "/")
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            yield (*_V2, group)
        elif "memory" in controllers.split(","):
            yield (*_V1, group)


def _machine(read: Read) -> Iterator[int]:
    for line in (read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            yield int(line.split()[1]) * 1024
