"""Sequences over scattered pages that hold rubbish wherever nothing was written, and attention by its definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torpor.actors.engine.attention import paged_attention
from torpor.actors.engine.batch import PagedBatch, Pages
from torpor.actors.engine.plan import Chunk
from torpor.actors.engine.reading import Reader
from torpor.native import Buffer, LayerSpec

BLOCK = 4  # tokens
SCALING = 0.3


@dataclass(frozen=True)
class Shape:
    """Of one layer's heads, and where its pool lies."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 8
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    slots: int = 40

    def pages(self, pool: Pool, reader: Reader) -> Pages:
        name = str(self.dtype).removeprefix("torch.")
        specs = [LayerSpec("full", [Buffer(role, [self.kv_heads, self.dim], name) for role in "kv"])]
        return Pages(pool, specs, torch.device(self.device), reader)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Layer:
    window: int | None = None
    softcap: float | None = None
    sinks: tuple[float, ...] | None = None  # by head

    def sink(self, head: int) -> float | None:
        return None if self.sinks is None else self.sinks[head % len(self.sinks)]


LAYERS = {
    "plain": Layer(),
    "window": Layer(window=6),
    "window of a block": Layer(window=4),
    "window of itself": Layer(window=1),
    "softcap": Layer(softcap=0.5),
    "sinks": Layer(sinks=(-2.0, -1.0, 0.0, 0.5, 1.0, 3.0)),
    "all": Layer(window=5, softcap=0.7, sinks=(1.0, 0.0, -1.0, 2.0, 0.3, -0.2)),
}

# Steps of parts: (text, start, end) of its new tokens.
STEPS = [
    [[(0, 0, 1), (1, 0, 1)], [(0, 1, 2), (2, 0, 1), (1, 1, 2)]],  # contexts of 2 and 1 decode together
    [[(0, 0, 13)], [(0, 13, 14), (1, 0, 5)], [(0, 14, 15), (1, 5, 9), (2, 0, 1)]],
    [[(0, 0, 4), (1, 0, 8), (2, 0, 9)], [(0, 4, 5), (1, 8, 9), (2, 9, 10)], [(2, 10, 18), (0, 5, 6)]],
]


class Pool:
    """Stands for a KV manager of one layer: undefined memory is no number."""

    tokens_per_block = BLOCK

    def __init__(self, shape: Shape, window: int = 0) -> None:
        self.life_cycles = [{"kind": "window" if window else "full", "window": window, "layers": [0]}]
        size = (shape.slots, 2, BLOCK, shape.kv_heads, shape.dim)
        self.memory = torch.full(size, float("nan"), dtype=shape.dtype, device=shape.device)

    def page_view(self, layer: int, role: str) -> torch.Tensor:
        return self.memory[:, "kv".index(role)]


class Texts:
    """Sequences with scattered pages, and all their queries, keys and values in order."""

    def __init__(self, shape: Shape, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(shape.slots, generator=generator).numpy().astype(np.int32)
        ends = np.cumsum([-(-length // BLOCK) for length in lengths])

        def random(heads: int) -> list[torch.Tensor]:
            made = [torch.randn(heads, n, shape.dim, generator=generator) for n in lengths]
            return [one.to(shape.device, shape.dtype) for one in made]

        self.shape = shape
        self.tables = [order[end - -(-n // BLOCK) : end] for end, n in zip(ends, lengths, strict=True)]
        self.query, self.key, self.value = random(shape.heads), random(shape.kv_heads), random(shape.kv_heads)

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
        sinks = None if layer.sinks is None else [layer.sink(head) for head in range(self.shape.heads)]
        output, _ = paged_attention(
            module,
            query,
            key,
            value,
            None,
            scaling=SCALING,
            paged_batch=batch,
            sliding_window=layer.window,
            softcap=layer.softcap,
            s_aux=None if sinks is None else torch.tensor(sinks, dtype=query.dtype, device=query.device),
        )
        return list(output[0].split([end - start for _, start, end in parts]))

    def expected(self, text: int, start: int, end: int, layer: Layer) -> torch.Tensor:
        """By the definition, in float64, one token and one head at a time. (tokens, heads, dim) on the CPU."""
        query, key, value = (source[text].cpu().double() for source in (self.query, self.key, self.value))
        rows = torch.empty(end - start, self.shape.heads, self.shape.dim, dtype=torch.float64)
        for position in range(start, end):
            seen = slice(0 if layer.window is None else max(position + 1 - layer.window, 0), position + 1)
            for head in range(self.shape.heads):
                group = head * self.shape.kv_heads // self.shape.heads
                scores = key[group, seen] @ query[head, position] * SCALING
                if layer.softcap is not None:
                    scores = layer.softcap * torch.tanh(scores / layer.softcap)
                sink = layer.sink(head)
                if sink is not None:
                    scores = torch.cat([scores, torch.tensor([sink], dtype=torch.float64)])
                weights = scores.softmax(dim=0)[: position + 1 - seen.start]
                rows[position - start, head] = weights @ value[group, seen]
        return rows


def check_steps(
    shape: Shape, steps: list[list[tuple[int, int, int]]], layer: Layer, reader: Reader, apart: float
) -> None:
    """Blocks that a window has passed go back, and hold rubbish again, as in a manager's tables.

    apart: the most that an output may differ from the definition's.
    """
    lengths = [1 + max(end for step in steps for text, _, end in step if text == one) for one in range(3)]
    texts, pool = Texts(shape, lengths), Pool(shape, layer.window or 0)
    pages = shape.pages(pool, reader)
    for parts in steps:
        for part, rows in zip(parts, texts.attend(pages, parts, layer), strict=True):
            want = texts.expected(*part, layer)
            torch.testing.assert_close(rows.cpu().double(), want, atol=apart, rtol=apart)
        for text, _, end in parts:
            passed = max(end - layer.window, 0) // BLOCK if layer.window else 0
            pool.memory[texts.tables[text][:passed].astype(np.int64)] = float("nan")
            texts.tables[text][:passed] = -1
