"""The processes below one, by the kernel's own list."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """started_at tells a process from a later one with the same pid (clock ticks since boot)."""

    pid: int
    parent: int
    started_at: int
    name: str


def descendants(pid: int) -> list[Process]:
    """All processes below `pid`, itself not included."""
    everyone = [
        one for entry in Path("/proc").iterdir() if entry.name.isdigit() and (one := _read(int(entry.name)))
    ]
    found: list[Process] = []
    parents = {pid}
    while True:
        more = [one for one in everyone if one.parent in parents and one not in found]
        if not more:
            return found
        found += more
        parents = {one.pid for one in more}


def alive(process: Process) -> bool:
    """Still there, and not only waiting to be collected."""
    now = _read(process.pid)
    return now is not None and now.started_at == process.started_at


def _read(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name stands in brackets and may hold anything.
    name = text[text.index("(") + 1 : text.rindex(")")]
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else Process(pid, int(fields[1]), int(fields[19]), name)
