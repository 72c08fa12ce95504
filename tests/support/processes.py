"""The machine's processes, as /proc tells."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children_of(pid: int) -> dict[int, str]:
    """All that descend from it, by pid: their command lines (of one that has ended: empty)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(words[1])
    found: set[int] = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: command_of(child) for child in sorted(found - {pid})}


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def has_memory(pid: int) -> bool:
    """False for one that has ended, also when its parent has not taken note yet."""
    try:
        return "VmRSS" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
