"""Attention over pages by the kernel of paged_kernel: page tables go to the device as they are, nothing is gathered."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
import triton

from torpor.actors.engine.paged_kernel import attend_tiles, join_parts
from torpor.actors.engine.reading import Scoring, Stretch

LEAST_SIDE = 16  # of what the tensor cores multiply
PROMPT_ROWS = 64
MOST_SPLITS = 32
SPLIT_TOKENS = 256  # a part of a context is not worth a program of its own with fewer
USUAL_PROGRAMS = 256  # about two for each multiprocessor of a large GPU


@dataclass(frozen=True, slots=True)
class Tiles:
    """Stretches of at most `most_tokens` new tokens, each against its own context of up to `longest_tokens`.

    table: (n, 4) int32 on the device: first row, tokens, position of the first, row of the page tables.
    """

    table: torch.Tensor
    most_tokens: int
    longest_tokens: int


class TiledReads:
    """See reading.Reads."""

    def __init__(
        self,
        tables: torch.Tensor,
        single: Tiles | None,
        long: SequenceOf[Stretch],
        window: int | None,
        tokens_per_block: int,
    ) -> None:
        """tables: (sequences, blocks) int32 on the device. single: of one new token each. long: of several, whose
        place in tables is their own in this sequence."""
        self._tables = tables
        self._single = single
        self._long = tuple(long)
        self._window = window or 0
        self._tokens_per_block = tokens_per_block
        self._prompts: dict[int, Tiles] = {}  # by tokens of a tile, which the layer's heads decide

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        query = query if query.stride(-1) == 1 else query.contiguous()
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call] # where the kernel goes
            self._attend(query, keys, values, output, scoring)
        return output

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        scoring: Scoring,
    ) -> None:
        if self._single is not None:
            self._launch(self._single, query, keys, values, output, scoring)
        if self._long:
            group = query.shape[1] // keys.shape[2]
            self._launch(
                self._prompt_tiles(max(PROMPT_ROWS // group, 1)), query, keys, values, output, scoring
            )

    def _prompt_tiles(self, most_tokens: int) -> Tiles:
        if most_tokens not in self._prompts:
            rows = [
                (one.row + at, min(most_tokens, one.tokens - at), one.start + at, index)
                for index, one in enumerate(self._long)
                for at in range(0, one.tokens, most_tokens)
            ]
            table = torch.from_numpy(np.array(rows, dtype=np.int32)).to(self._tables.device)
            longest = max(one.start + one.tokens for one in self._long)
            self._prompts[most_tokens] = Tiles(table, most_tokens, longest)
        return self._prompts[most_tokens]

    def _launch(
        self,
        tiles: Tiles,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        scoring: Scoring,
    ) -> None:
        rows, heads, dim = query.shape
        kv_heads, count = keys.shape[2], len(tiles.table)
        splits = 1
        if tiles.most_tokens == 1:
            seen = min(tiles.longest_tokens, self._window or tiles.longest_tokens)
            splits = splits_of(count * kv_heads, seen)
        parts, maxima, sums = (
            _scratch(splits, rows, heads, dim, query.device) if splits > 1 else (output,) * 3
        )
        sinks = scoring.sinks if scoring.sinks is not None else output
        padded = max(triton.next_power_of_2(dim), LEAST_SIDE)
        group = heads // kv_heads
        lines = max(triton.next_power_of_2(group * tiles.most_tokens), LEAST_SIDE)
        constants = {
            "DIM": dim,
            "DIM_PADDED": padded,
            "HAS_SINKS": scoring.sinks is not None,
            "SPLITS": splits,
        }
        attend_tiles[(count, kv_heads, splits)](
            query,
            keys,
            values,
            output,
            parts,
            maxima,
            sums,
            sinks,
            tiles.table,
            self._tables,
            scoring.scaling,
            scoring.softcap or 1.0,
            heads,
            rows,
            query.stride(0),
            query.stride(1),
            *keys.stride()[:3],
            *values.stride()[:3],
            self._tables.stride(0),
            WINDOW=self._window,
            GROUP=group,
            TOKENS_PER_BLOCK=self._tokens_per_block,
            ROWS=lines,
            COLUMNS=64 if query.element_size() * padded <= 256 else 32,
            HAS_SOFTCAP=scoring.softcap is not None,
            num_warps=8 if lines * padded >= 16384 else 4,
            num_stages=2 if query.element_size() * padded <= 512 else 1,  # what shared memory holds
            **constants,
        )
        if splits > 1:
            join_parts[(count, heads)](
                output, parts, maxima, sums, sinks, tiles.table, heads, rows, **constants, num_warps=2
            )


def splits_of(programs: int, context_tokens: int) -> int:
    """A power of two: over how many programs each context is split, so that all of the GPU has work."""
    wanted = min(USUAL_PROGRAMS // max(programs, 1), context_tokens // SPLIT_TOKENS, MOST_SPLITS)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1


def _scratch(
    splits: int, rows: int, heads: int, dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """parts, maxima and sums, float32."""
    lines = (splits, rows, heads)
    return (
        torch.empty((*lines, dim), dtype=torch.float32, device=device),
        torch.empty(lines, dtype=torch.float32, device=device),
        torch.empty(lines, dtype=torch.float32, device=device),
    )


def read_singles(
    tables: torch.Tensor, tiles: torch.Tensor, window: int | None, tokens_per_block: int
) -> TiledReads:
    """One new token each of sequences whose tables and tiles (see Tiles) may be others whenever it is attended to."""
    longest = tables.shape[1] * tokens_per_block
    return TiledReads(tables, Tiles(tiles, 1, longest), (), window, tokens_per_block)


class TiledReader:
    """See reading.Reader."""

    name = "triton"

    def __call__(
        self, stretches: SequenceOf[Stretch], window: int | None, tokens_per_block: int, device: torch.device
    ) -> TiledReads:
        long = [one for one in stretches if one.tokens > 1]
        single = [one for one in stretches if one.tokens == 1]
        ordered = [*long, *single]
        blocks = [-(-(one.start + one.tokens) // tokens_per_block) for one in ordered]
        tables = np.zeros((len(ordered), max(blocks)), dtype=np.int32)
        for place, (one, count) in enumerate(zip(ordered, blocks, strict=True)):
            tables[place, :count] = one.table[:count]
        tiles = None
        if single:
            rows = [(one.row, 1, one.start, len(long) + place) for place, one in enumerate(single)]
            table = torch.from_numpy(np.array(rows, dtype=np.int32)).to(device)
            tiles = Tiles(table, 1, max(one.start for one in single) + 1)
        return TiledReads(torch.from_numpy(tables).to(device), tiles, long, window, tokens_per_block)
