"""Attention over pages that hold rubbish wherever nothing was written, against plain attention, in plain torch.

The kernel passes the same cases in tests/gpu/test_attention_on_cuda.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.paged_texts import LAYERS, STEPS, Layer, Pool, Shape, Texts, check_steps

from torpor.actors.engine.attention import check_implementation, make_reader
from torpor.actors.engine.errors import ModelRefused
from torpor.actors.engine.gathered import GatheredReader, Single, similar_lengths
from torpor.actors.engine.plan import Chunk


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_mixed_steps_over_scattered_pages_read_what_was_written_and_nothing_else(
    steps: list[list[tuple[int, int, int]]], layer: Layer
) -> None:
    check_steps(Shape(), steps, layer, GatheredReader(), apart=1e-5)


def test_a_window_other_than_that_of_the_pages_is_never_served() -> None:
    shape = Shape()
    pages = shape.pages(Pool(shape, window=6), GatheredReader())
    with pytest.raises(AssertionError, match="a window of 7, pages keep 6"):
        Texts(shape, [20]).attend(pages, [(0, 0, 4)], Layer(window=7))


def test_sequences_decode_together_only_when_padding_at_most_doubles_the_work() -> None:
    table = np.zeros(1, dtype=np.int32)
    groups = similar_lengths([Single(n, 0, row, table) for row, n in enumerate([1, 100, 2, 3, 199, 201])])
    assert [[one.context_tokens for one in group] for group in groups] == [[1, 2], [3], [100, 199], [201]]


def test_a_chunk_beyond_its_sequences_pages_is_never_written() -> None:
    shape = Shape()
    pages = shape.pages(Pool(shape), GatheredReader())
    with pytest.raises(AssertionError, match="beyond the pages"):
        pages.batch([Chunk(0, 4, (1,), True)], [[np.array([3, -1], dtype=np.int32)]])


def test_a_host_device_has_plain_torch_and_a_kernel_that_it_cannot_run_is_refused() -> None:
    check_implementation("auto", "host")
    assert make_reader("auto", "host").name == make_reader("torch", "cuda").name == "torch"
    with pytest.raises(ModelRefused, match="triton needs a CUDA device; here use auto or torch"):
        check_implementation("triton", "host")
    with pytest.raises(ModelRefused, match="'flash' is unknown; known: auto, torch, triton"):
        check_implementation("flash", "cuda")
