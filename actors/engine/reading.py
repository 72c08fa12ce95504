"""What attention is told of one forward: where each sequence's new tokens and pages are, and how to weigh what it reads.

An implementation is a Reads; the engine has two, which do the same: `gathered`, of plain torch, and `tiled`, a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer weighs its context. softcap: bound of the scores. sinks: (heads,) scores of a token without value."""

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """`tokens` new tokens of one sequence, from position `start` on, in the packed rows from `row` on.

    table: slots of its pages by block, from position 0 on; those that its window has passed mean nothing.
    """

    row: int
    tokens: int
    start: int
    table: NDArray[np.int32]


class Reads(Protocol):
    """What the stretches of one forward read in the layers of one life cycle."""

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """query: (T, heads, head_dim). keys, values: (slots, tokens_per_block, kv_heads, head_dim), the new tokens'
        own in place already. Returns query's like."""


class Reader(Protocol):
    """Makes Reads. name: as `engine.attention` has it."""

    @property
    def name(self) -> str: ...

    def __call__(
        self, stretches: SequenceOf[Stretch], window: int | None, tokens_per_block: int, device: torch.device
    ) -> Reads:
        """window: tokens that one of them sees, itself included; None: all."""
