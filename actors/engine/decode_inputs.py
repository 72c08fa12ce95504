"""What captured forwards of one new token each read: numbers and page tables at addresses that never change.

They are filled before each replay. Lines that a bucket has too many repeat the last sequence: it is then computed and
written more than once, with the same result.
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
        most_sequences: int,
        most_tokens: int,
        make_memory: MakeMemory,
        make_reads: MakeReads,
    ) -> None:
        """most_tokens: of one sequence."""
        self._pages = pages
        self._make_reads = make_reads
        cycles, blocks = len(pages.cycles), -(-most_tokens // pages.tokens_per_block)
        shapes = (
            (FIRST_CYCLE + cycles, most_sequences),
            (most_sequences, 4),
            (cycles, most_sequences, blocks),
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
        self._new_numbers[LINES] = torch.arange(most_sequences)
        self._new_tiles[:, 0] = torch.arange(most_sequences)
        self._new_tiles[:, 1] = 1
        self._new_tiles[:, 3] = torch.arange(most_sequences)
        self._send(most_sequences)  # one token in the first slot: what a capture computes

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
        """chunks: one token each, at most `lines`; the step before must have been computed. tables: as in Pages.batch."""
        numbers, tiles, new_tables = (
            tensor.numpy() for tensor in (self._new_numbers, self._new_tiles, self._new_tables)
        )
        size, count = self._pages.tokens_per_block, len(chunks)
        starts = np.array([chunk.start for chunk in chunks])
        numbers[TOKENS, :count] = [chunk.tokens[0] for chunk in chunks]
        numbers[POSITIONS, :count] = starts
        numbers[OFFSETS, :count] = starts % size
        for index, cycle in self._pages.cycles:
            slots = numbers[FIRST_CYCLE + index]
            for line, (chunk, of_sequence) in enumerate(zip(chunks, tables, strict=True)):
                table, block = of_sequence[index], chunk.start // size
                if cycle["kind"] == "state":
                    slots[line] = table[0]
                    continue
                new_tables[index, line, : block + 1] = table[: block + 1]
                slots[line] = table[block]
            if slots[:count].min() < 0:
                raise AssertionError("a token lies beyond the pages of its sequence")
        tiles[:count, 2], tiles[:count, 3] = starts, np.arange(count)
        for filled in (numbers[:LINES], numbers[FIRST_CYCLE:], tiles[:, 2:].T):
            filled[:, count:lines] = filled[:, count - 1 : count]
        self._send(count)

    def _send(self, count: int) -> None:
        """Further lines read the tables of the last one of the first `count`."""
        self._numbers.copy_(self._new_numbers, non_blocking=True)
        self._tiles.copy_(self._new_tiles, non_blocking=True)
        for there, here in zip(self._tables, self._new_tables, strict=True):
            there[:count].copy_(here[:count], non_blocking=True)
