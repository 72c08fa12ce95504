"""Stands for the kernel and for captured graphs where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torpor.actors.engine.gathered import attend
from torpor.actors.engine.reading import Scoring


class TableReads:
    """By the tables and tiles as they are when it attends, as the kernel; see tiled.read_singles."""

    def __init__(self, tables: torch.Tensor, tiles: torch.Tensor, window: int | None, size: int) -> None:
        self.tables, self.tiles, self.window, self.size = tables, tiles, window, size

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        for row, tokens, position, line in self.tiles.tolist():
            assert tokens == 1
            seen = torch.arange(max(0, position + 1 - self.window) if self.window else 0, position + 1)
            slots = self.tables[line][seen // self.size].long()
            key, value = (pool[slots, seen % self.size].transpose(0, 1)[None] for pool in (keys, values))
            mask = torch.ones(1, len(seen), dtype=torch.bool)
            output[row] = attend(query[None, row, :, None], key, value, mask, scoring)[0, :, 0]
        return output


def capture(forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Computes at once, as a capture's warm-up, and again for each replay."""
    forward()
    return forward
