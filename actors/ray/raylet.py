"""The bonds of workers and drivers with the raylet of their node.

By itself a worker notices only after a minute that its node's raylet has been killed. Until then a rank would hold
its device's memory against those that replace it, and a coordinator its journal.

A driver lives on without its raylet, and its calls go on to actors that stay where they are. But it is a raylet that
tells its drivers when Ray's head has come back: without one a driver never hears where an actor is that has moved
meanwhile, such as the coordinator.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from torpor.actors.ray.processes import is_there, start_of

POLL_S = 0.5


def end_with_raylet() -> None:
    """From now on this process ends soon after its parent, without any clean-up: the kernel gives its memory back."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="raylet watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


@dataclass(frozen=True, slots=True)
class Raylet:
    """The process, whatever gets its number after its end."""

    pid: int
    began: str

    @property
    def lives(self) -> bool:
        return is_there(self.pid, self.began)


def raylet_of(node: str) -> Raylet | None:
    """That of a node of this machine, by the node's id in hexadecimal. Ray's drivers find theirs by the same option."""
    for entry in Path("/proc").iterdir():
        words = _command(entry) if entry.name.isdigit() else []
        if words and Path(words[0]).name == "raylet" and f"--node_id={node}" in words:
            pid = int(entry.name)
            return Raylet(pid, start_of(pid))
    return None


def _command(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:  # it has ended meanwhile
        return []
