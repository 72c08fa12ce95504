"""Attention over pages that hold rubbish wherever nothing was written, against plain attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from torpor.actors.engine.attention import paged_attention
from torpor.actors.engine.batch import PagedBatch, Pages, Single, similar_lengths
from torpor.actors.engine.plan import Chunk
from torpor.native import Buffer, LayerSpec

BLOCK, KV_HEADS, HEADS, DIM, SLOTS = 4, 2, 6, 8, 40

SPECS = [LayerSpec("full", [Buffer(role, [KV_HEADS, DIM], "float32") for role in "kv"])]


class Pool:
    """Stands for a KV manager of one layer: undefined memory is no number."""

    tokens_per_block = BLOCK

    def __init__(self, window: int = 0) -> None:
        self.life_cycles = [{"kind": "window" if window else "full", "window": window, "layers": [0]}]
        self.memory = torch.full((SLOTS, 2, BLOCK, KV_HEADS, DIM), float("nan"))

    def page_view(self, layer: int, role: str) -> torch.Tensor:
        return self.memory[:, "kv".index(role)]


@dataclass(frozen=True)
class Layer:
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


LAYERS = {
    "plain": Layer(),
    "window": Layer(window=6),
    "window of a block": Layer(window=4),
    "window of itself": Layer(window=1),
    "softcap": Layer(softcap=0.5),
    "sinks": Layer(sinks=torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0])),
    "all": Layer(window=5, softcap=0.7, sinks=torch.tensor([1.0, 0.0, -1.0, 2.0, 0.3, -0.2])),
}


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

    def attend(self, pages: Pages, parts: list[tuple[int, int, int]], layer: Layer) -> list[torch.Tensor]:
        """parts: (text, start, end) of the new tokens. Returns (tokens, heads, dim) for each."""
        chunks = [Chunk(text, start, (0,) * (end - start), False) for text, start, end in parts]
        batch: PagedBatch = pages.batch(chunks, [[self.tables[text]] for text, _, _ in parts])
        query, key, value = (
            torch.cat([source[text][:, start:end] for text, start, end in parts], dim=1)[None]
            for source in (self.query, self.key, self.value)
        )
        module = torch.nn.Module()
        module.layer_idx = 0  # type: ignore[assignment]
        output, _ = paged_attention(
            module,
            query,
            key,
            value,
            None,
            scaling=0.3,
            paged_batch=batch,
            sliding_window=layer.window,
            softcap=layer.softcap,
            s_aux=layer.sinks,
        )
        return list(output[0].split([end - start for _, start, end in parts]))

    def expected(self, text: int, start: int, end: int, layer: Layer) -> torch.Tensor:
        """By the definition, one token and one head at a time."""
        rows = torch.empty(end - start, HEADS, DIM)
        for position in range(start, end):
            seen = slice(0 if layer.window is None else max(position + 1 - layer.window, 0), position + 1)
            for head in range(HEADS):
                group = head * KV_HEADS // HEADS
                scores = self.key[text][group, seen] @ self.query[text][head, position] * 0.3
                if layer.softcap is not None:
                    scores = layer.softcap * torch.tanh(scores / layer.softcap)
                weights = scores.exp()
                total = weights.sum() + (0.0 if layer.sinks is None else layer.sinks[head].exp())
                rows[position - start, head] = weights / total @ self.value[text][group, seen]
        return rows


@pytest.mark.parametrize(
    "steps",
    [
        [[(0, 0, 1), (1, 0, 1)], [(0, 1, 2), (2, 0, 1), (1, 1, 2)]],  # contexts of 2 and 1 decode together
        [[(0, 0, 13)], [(0, 13, 14), (1, 0, 5)], [(0, 14, 15), (1, 5, 9), (2, 0, 1)]],
        [[(0, 0, 4), (1, 0, 8), (2, 0, 9)], [(0, 4, 5), (1, 8, 9), (2, 9, 10)], [(2, 10, 18), (0, 5, 6)]],
    ],
)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_mixed_steps_over_scattered_pages_read_what_was_written_and_nothing_else(
    steps: list[list[tuple[int, int, int]]], layer: Layer
) -> None:
    """Blocks that a window has passed go back, and hold rubbish again, as in a manager's tables."""
    texts = Texts([20, 20, 20])
    pool = Pool(layer.window or 0)
    pages = Pages(pool, SPECS, torch.device("cpu"))  # type: ignore[arg-type]
    for parts in steps:
        for part, rows in zip(parts, texts.attend(pages, parts, layer), strict=True):
            torch.testing.assert_close(rows, texts.expected(*part, layer), atol=1e-5, rtol=1e-5)
        for text, _, end in parts:
            passed = max(end - layer.window, 0) // BLOCK if layer.window else 0
            pool.memory[texts.tables[text][:passed]] = float("nan")
            texts.tables[text][:passed] = -1


def test_a_window_other_than_that_of_the_pages_is_never_served() -> None:
    pages = Pages(Pool(window=6), SPECS, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="a window of 7, pages keep 6"):
        Texts([20]).attend(pages, [(0, 0, 4)], Layer(window=7))


def test_sequences_decode_together_only_when_padding_at_most_doubles_the_work() -> None:
    table = np.zeros(1, dtype=np.int32)
    groups = similar_lengths([Single(n, 0, row, table) for row, n in enumerate([1, 100, 2, 3, 199, 201])])
    assert [[one.context_tokens for one in group] for group in groups] == [[1, 2], [3], [100, 199], [201]]


def test_a_chunk_beyond_its_sequences_pages_is_never_written() -> None:
    pages = Pages(Pool(), SPECS, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="beyond the pages"):
        pages.batch([Chunk(0, 4, (1,), True)], [[np.array([3, -1], dtype=np.int32)]])
