"""Attention over pages that hold rubbish wherever nothing was written, against plain attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torpor.actors.engine.attention import paged_attention
from torpor.actors.engine.batch import PagedBatch, Pages, similar_lengths
from torpor.actors.engine.plan import Chunk

BLOCK, KV_HEADS, HEADS, DIM, SLOTS = 4, 2, 6, 8, 40


class Pool:
    """Stands for a KV manager of one layer: undefined memory is no number."""

    tokens_per_block = BLOCK

    def __init__(self) -> None:
        self.memory = torch.full((SLOTS, 2, BLOCK, KV_HEADS, DIM), float("nan"))

    def page_view(self, layer: int, role: str) -> torch.Tensor:
        return self.memory[:, "kv".index(role)]


class Texts:
    """Sequences with scattered pages, and all their queries, keys and values in order."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(SLOTS, generator=generator).numpy().astype(np.int32)
        ends = np.cumsum([-(-length // BLOCK) for length in lengths])
        self.tables = [order[end - -(-n // BLOCK) : end] for end, n in zip(ends, lengths, strict=True)]
        self.query = [torch.randn(HEADS, n, DIM, generator=generator) for n in lengths]
        self.key = [torch.randn(KV_HEADS, n, DIM, generator=generator) for n in lengths]
        self.value = [torch.randn(KV_HEADS, n, DIM, generator=generator) for n in lengths]

    def attend(self, pages: Pages, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """parts: (text, start, end) of the new tokens. Returns (tokens, heads, dim) for each."""
        chunks = [Chunk(text, start, (0,) * (end - start), False) for text, start, end in parts]
        batch: PagedBatch = pages.batch(chunks, [self.tables[text] for text, _, _ in parts])
        query, key, value = (
            torch.cat([source[text][:, start:end] for text, start, end in parts], dim=1)[None]
            for source in (self.query, self.key, self.value)
        )
        module = torch.nn.Module()
        module.layer_idx = 0  # type: ignore[assignment]
        output, _ = paged_attention(module, query, key, value, None, scaling=0.3, paged_batch=batch)
        return list(output[0].split([end - start for _, start, end in parts]))

    def expected(self, text: int, start: int, end: int) -> torch.Tensor:
        """By the definition, one token and one head at a time."""
        rows = torch.empty(end - start, HEADS, DIM)
        for position in range(start, end):
            for head in range(HEADS):
                group = head * KV_HEADS // HEADS
                key, value = self.key[text][group, : position + 1], self.value[text][group, : position + 1]
                weights = torch.softmax(key @ self.query[text][head, position] * 0.3, dim=0)
                rows[position - start, head] = weights @ value
        return rows


@pytest.mark.parametrize(
    "steps",
    [
        [[(0, 0, 1), (1, 0, 1)], [(0, 1, 2), (2, 0, 1), (1, 1, 2)]],  # contexts of 2 and 1 decode together
        [[(0, 0, 13)], [(0, 13, 14), (1, 0, 5)], [(0, 14, 15), (1, 5, 9), (2, 0, 1)]],
        [[(0, 0, 4), (1, 0, 8), (2, 0, 9)], [(0, 4, 5), (1, 8, 9), (2, 9, 10)], [(2, 10, 18), (0, 5, 6)]],
    ],
)
def test_mixed_steps_over_scattered_pages_read_what_was_written_and_nothing_else(
    steps: list[list[tuple[int, int, int]]],
) -> None:
    texts = Texts([20, 20, 20])
    pages = Pages(Pool(), 1, torch.device("cpu"))  # type: ignore[arg-type]
    for parts in steps:
        for part, rows in zip(parts, texts.attend(pages, parts), strict=True):
            torch.testing.assert_close(rows, texts.expected(*part), atol=1e-5, rtol=1e-5)


def test_sequences_decode_together_only_when_padding_at_most_doubles_the_work() -> None:
    table = np.zeros(1, dtype=np.int32)
    groups = similar_lengths([(n, row, table) for row, n in enumerate([1, 100, 2, 3, 199, 201])])
    assert [[context for context, _, _ in group] for group in groups] == [[1, 2], [3], [100, 199], [201]]


def test_a_chunk_beyond_its_sequences_pages_is_never_written() -> None:
    pages = Pages(Pool(), 1, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="beyond the pages"):
        pages.batch([Chunk(0, 4, (1,), True)], [np.array([3, -1], dtype=np.int32)])
