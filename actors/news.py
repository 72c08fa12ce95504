"""What happens in a cluster, as those hear it who follow it: changes in order, and where one is in them."""

from __future__ import annotations

from dataclasses import dataclass

from torpor.actors.messages import ModelView, Operation

_LONGEST = 40  # characters of a position: two numbers of 64 bits


@dataclass(frozen=True, slots=True)
class Position:
    """How far one has read: changes of a coordinator's epoch are numbered from 1."""

    epoch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.sequence}"

    @staticmethod
    def parse(text: str) -> Position:
        """As `str` writes it. Raises ValueError."""
        epoch, colon, sequence = text.partition(":")
        if len(text) > _LONGEST or not (colon and epoch.isdecimal() and sequence.isdecimal()):
            raise ValueError(f"{text[:_LONGEST]!r} is no event id, such as 3:17")
        return Position(int(epoch), int(sequence))


@dataclass(frozen=True, slots=True)
class Change:
    """One of model, operation, deleted (a model's name) is set, or reset: changes were missed; read everything anew."""

    at: Position
    model: ModelView | None = None
    operation: Operation | None = None
    deleted: str = ""
    reset: bool = False


@dataclass(frozen=True, slots=True)
class Changes:
    """until: ask for what comes after it next time."""

    until: Position
    changes: tuple[Change, ...] = ()
