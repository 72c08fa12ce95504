"""The paged attention kernel, on the cases that plain torch passes in tests/actors/engine/test_batch.py, and larger ones.

Without a GPU, triton's interpreter runs it: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from support.paged_texts import LAYERS, STEPS, Layer, Shape, check_steps

from torpor.actors.engine.reading import Reader

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
APART = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ORDINARY = Shape(device="cpu" if INTERPRETED else "cuda")
LONG = [[(0, 0, 70), (1, 0, 5)], [(0, 70, 71), (1, 5, 6), (2, 0, 33)], [(0, 71, 140), (1, 6, 7), (2, 33, 34)]]


@pytest.fixture
def reader() -> Reader:
    from torpor.actors.engine.tiled import TiledReader

    return TiledReader()


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_mixed_steps_over_scattered_pages_read_what_was_written_and_nothing_else(
    steps: list[list[tuple[int, int, int]]], layer: Layer, reader: Reader
) -> None:
    check_steps(ORDINARY, steps, layer, reader, apart=1e-5)


@pytest.mark.parametrize("dtype", APART, ids=str)
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads"), [(64, 4, 1), (80, 5, 5), (96, 6, 2), (128, 8, 1), (256, 4, 2)]
)
def test_heads_of_every_size_in_every_dtype_over_several_tiles(
    dim: int, heads: int, kv_heads: int, dtype: torch.dtype, reader: Reader
) -> None:
    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("triton's interpreter multiplies no bfloat16")
    shape = replace(ORDINARY, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, slots=60)
    for name in ("plain", "all"):
        check_steps(shape, LONG, LAYERS[name], reader, APART[dtype])


@pytest.mark.parametrize("layer", ["plain", "sinks", "window of hundreds"])
def test_long_contexts_that_are_split_over_programs_are_joined_again(
    layer: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parts so short that a small context has many, some of them empty."""
    from torpor.actors.engine import tiled

    monkeypatch.setattr(tiled, "SPLIT_TOKENS", 8)
    monkeypatch.setattr(tiled, "USUAL_PROGRAMS", 64)
    assert tiled.splits_of(4, 150) == 16
    steps = [[(0, 0, 150), (1, 0, 40)], [(0, 150, 151), (1, 40, 41)], [(0, 151, 152), (2, 0, 1)]]
    made = (LAYERS | {"window of hundreds": Layer(window=100)})[layer]
    check_steps(replace(ORDINARY, slots=60), steps, made, reader, apart=1e-5)


def test_contexts_are_split_only_where_the_gpu_would_be_idle(reader: Reader) -> None:
    from torpor.actors.engine.tiled import splits_of

    assert [splits_of(8, tokens) for tokens in (1, 511, 512, 2048, 100_000)] == [1, 1, 2, 8, 32]
    assert [splits_of(programs, 8192) for programs in (1, 16, 64, 256, 1000)] == [32, 16, 4, 1, 1]
