"""One step as the leader sends it to its followers: logical operations on sequences, then one forward."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Act(enum.StrEnum):
    CREATE = "create"
    RESUME = "resume"
    RESIZE = "resize"
    COMMIT = "commit"
    SNAPSHOT = "snapshot"
    SUSPEND = "suspend"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Operation:
    """One call on a sequence. `outcome` is what it answered on the leader and must answer everywhere.

    tokens: the prompt of a create, the tokens of a commit. capacity_tokens: of a resize.
    outcome: matched tokens of a create, 0 or 1 of resume, resize and snapshot, else 0.
    """

    act: Act
    key: int
    outcome: int = 0
    scope: str = ""
    tokens: tuple[int, ...] = ()
    capacity_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence in a forward: `tokens` lie at positions start, start + 1, …"""

    key: int
    start: int
    tokens: tuple[int, ...]
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    number: int
    operations: tuple[Operation, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def only_closes(self) -> bool:
        """It may be followed at rest: a cache lets go of sequences at any time, also while it sleeps."""
        return not self.chunks and all(operation.act is Act.CLOSE for operation in self.operations)


@dataclass(frozen=True, slots=True)
class Go:
    """All ranks have taken the plan and agree: run its forward. Not acknowledged."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The leader stays between two steps, `number` having been its last, until a Proceed."""

    number: int


@dataclass(frozen=True, slots=True)
class Proceed:
    pass


@dataclass(frozen=True, slots=True)
class Farewell:
    """The leader closes in good order."""


Message = StepPlan | Go | Pause | Proceed | Farewell
