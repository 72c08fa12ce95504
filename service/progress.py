"""How far work is, read from the records of operations and models; where it is shown is a Board's own affair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Record = Mapping[str, Any]
# The phases of each kind in their order; of others it is not known how many there will be.
PHASES: Mapping[str, tuple[str, ...]] = {
    "sleep": ("preflight", "drain", "stage", "commit", "publish"),
    "wake": ("preflight", "stage", "commit", "publish"),
    "update": ("preflight", "drain", "stage", "commit", "publish"),
    "recover": ("end", "load"),
    "delete": ("drain", "end"),
}
# The outcomes of a rank that has a phase behind it.
_PASSED: Mapping[str, tuple[str, ...]] = {
    "preflight": ("prepared", "staged", "committed"),
    "stage": ("staged", "committed"),
    "commit": ("committed",),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """text: all of it in words. total None: nobody knows how much there is."""

    text: str
    done: float = 0.0
    total: float | None = None


class Board(Protocol):
    """Where people see what goes on. live: it is redrawn, so that more detail costs no line."""

    live: bool

    def say(self, text: str) -> None:
        """A line that stays."""

    def show(self, name: str, stage: Stage) -> None:
        """How far the work of this name is now."""

    def end(self, name: str) -> None:
        """It is over. Unknown names are ignored."""


def of_operation(record: Record) -> Stage:
    """Of one that runs, as GET /operations shows it."""
    kind, ranks = str(record["kind"]), record["ranks"]
    phase = str(record["phases"][-1]["name"]) if record["phases"] else ""
    passed = sum(rank["outcome"] in _PASSED.get(phase, ()) for rank in ranks)
    counted = len(ranks) > 1 and phase in _PASSED
    told = f", {passed} of {len(ranks)} ranks" if counted else ""
    text = f"{kind} {record['model']}: {phase or 'waiting for its turn'}{told}"
    order = PHASES.get(kind)
    if order is None or (phase and phase not in order):
        return Stage(text)
    begun = order.index(phase) if phase else 0
    return Stage(text, begun + (passed / len(ranks) if counted else 0.0), len(order))


def of_model(record: Record) -> Stage:
    """Of one that loads, as GET /models shows it; without its ranks where they were not asked."""
    ranks, count = record["ranks"], record["tensor_parallel"]
    loaded = sum(rank["loaded"] for rank in ranks)
    told = f", {loaded} of {count} ranks" if ranks and count > 1 else ""
    return Stage(f"{record['name']}: {record['state']}{told}", loaded, count if count > 1 else None)
