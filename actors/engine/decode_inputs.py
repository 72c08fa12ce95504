"""What captured forwards of one new token a line read: numbers and page tables at addresses that never change.

They are filled before each replay. A line is a token of a sequence; several of one sequence see each other's K and V,
which are all written before anything is read. Lines that a bucket has too many repeat the last one: it is then computed
and written more than once, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from math import prod

import numpy as np
import torch

from torpor.actors.engine.batch import PagedBatch, Pages, Places, Tables
from torpor.actors.engine.plan import Chunk
from torpor.actors.engine.reading import Reads
from torpor.actors.engine.states import SlotStates

TOKENS, POSITIONS, OFFSETS, LINES, FIRST_CYCLE = range(
    5
)  # rows of the numbers; behind, one for each life cycle
MakeMemory = Callable[
    [int], torch.Tensor
]  # from bytes to uint8 on the device, kept in every restore mode (S3)
# Of tables (sequences, blocks), tiles (sequences, 4), both int32, window, tokens a block: see tiled.read_singles.
MakeReads = Callable[[torch.Tensor, torch.Tensor, int | None, int], Reads]


class DecodeInputs:
    def __init__(
        self,
        pages: Pages,
        most_lines: int,
        most_tokens: int,
        make_memory: MakeMemory,
        make_reads: MakeReads,
    ) -> None:
        """most_tokens: of one sequence."""
        self._pages = pages
        self._make_reads = make_reads
        cycles, blocks = len(pages.cycles), -(-most_tokens // pages.tokens_per_block)
        shapes = (
            (FIRST_CYCLE + cycles, most_lines),
            (most_lines, 4),
            (cycles, most_lines, blocks),
        )
        sizes = [prod(shape) * width for shape, width in zip(shapes, (8, 4, 4), strict=True)]
        numbers, tiles, tables = torch.split(make_memory(sum(sizes))[: sum(sizes)], sizes)
        self._numbers = numbers.view(torch.int64).view(shapes[0])
        self._tiles = tiles.view(torch.int32).view(shapes[1])
        self._tables = tables.view(torch.int32).view(shapes[2])
        pinned = pages.device.type == "cuda"
        self._new_numbers = torch.zeros(shapes[0], dtype=torch.int64, pin_memory=pinned)
        self._new_tiles = torch.zeros(shapes[1], dtype=torch.int32, pin_memory=pinned)
        self._new_tables = torch.zeros(shapes[2], dtype=torch.int32, pin_memory=pinned)
        self._new_numbers[LINES] = torch.arange(most_lines)
        self._new_tiles[:, 0] = torch.arange(most_lines)
        self._new_tiles[:, 1] = 1
        self._new_tiles[:, 3] = torch.arange(most_lines)
        self._send(most_lines)  # one token in the first slot: what a capture computes

    @property
    def has_states(self) -> bool:
        """Then a line must be of a sequence of its own."""
        return bool(self._pages.states)

    def batch(self, lines: int) -> PagedBatch:
        """Of the first `lines` lines, by views."""
        pages, numbers = self._pages, self._numbers[:, :lines]
        places: dict[int, Places] = {}
        slots: dict[int, torch.Tensor] = {}
        for index, cycle in pages.cycles:
            of_new = numbers[FIRST_CYCLE + index]
            if cycle["kind"] == "state":
                slots |= dict.fromkeys(cycle["layers"], of_new)
                continue
            window = int(cycle["window"]) or None
            reads = self._make_reads(
                self._tables[index, :lines], self._tiles[:lines], window, pages.tokens_per_block
            )
            places |= dict.fromkeys(cycle["layers"], Places(window, of_new, numbers[OFFSETS], reads))
        rows = (lines, 1) if slots else (1, lines)
        return PagedBatch(
            keys=pages.keys,
            values=pages.values,
            places=places,
            input_ids=numbers[TOKENS].view(rows),
            position_ids=numbers[POSITIONS].view(rows),
            states=SlotStates(pages.states, slots) if slots else None,
            logit_rows=numbers[LINES],
        )

    def fill(self, chunks: SequenceOf[Chunk], tables: SequenceOf[Tables], lines: int) -> None:
        """chunks: of at most `lines` tokens together, one each where there are states; the step before must have been
        computed. tables: as in Pages.batch."""
        numbers, tiles, new_tables = (
            tensor.numpy() for tensor in (self._new_numbers, self._new_tiles, self._new_tables)
        )
        size, counts = self._pages.tokens_per_block, [len(chunk.tokens) for chunk in chunks]
        used, ends = sum(counts), np.cumsum(counts)
        positions = np.repeat([chunk.start for chunk in chunks] - ends + counts, counts) + np.arange(used)
        numbers[TOKENS, :used] = [token for chunk in chunks for token in chunk.tokens]
        numbers[POSITIONS, :used] = positions
        numbers[OFFSETS, :used] = positions % size
        for index, cycle in self._pages.cycles:
            slots = numbers[FIRST_CYCLE + index]
            for row, (count, end, of_sequence) in enumerate(zip(counts, ends, tables, strict=True)):
                table = of_sequence[index]
                if cycle["kind"] == "state":
                    slots[row] = table[0]
                    continue
                blocks = positions[end - count : end] // size
                new_tables[index, row, : blocks[-1] + 1] = table[: blocks[-1] + 1]
                slots[end - count : end] = table[blocks]
            if slots[:used].min() < 0:
                raise AssertionError("a token lies beyond the pages of its sequence")
        tiles[:used, 2], tiles[:used, 3] = positions, np.repeat(np.arange(len(chunks)), counts)
        for filled in (numbers[:LINES], numbers[FIRST_CYCLE:], tiles[:, 2:].T):
            filled[:, used:lines] = filled[:, used - 1 : used]
        self._send(len(chunks))

    def _send(self, count: int) -> None:
        """No line reads the tables of more than the first `count` sequences."""
        self._numbers.copy_(self._new_numbers, non_blocking=True)
        self._tiles.copy_(self._new_tiles, non_blocking=True)
        for there, here in zip(self._tables, self._new_tables, strict=True):
            there[:count].copy_(here[:count], non_blocking=True)
