"""Layouts of many kinds of layers: whatever is declared, parts never overlap, are aligned, and show what is there."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torpor.native import Buffer, Device, LayerSpec, Ledger, Misuse

GRANULE_BYTES = 64 << 10
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}
_numbers = itertools.count()

buffers = st.lists(
    st.tuples(
        st.sampled_from("kvxyz"),
        st.lists(st.integers(1, 5), min_size=1, max_size=3),
        st.sampled_from(sorted(DTYPES)),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda one: one[0],
)
kinds = st.one_of(
    st.just(("full", 0, 0)),
    st.just(("state", 0, 0)),
    st.tuples(st.just("window"), st.integers(1, 9), st.integers(0, 5)),
)
layouts = st.lists(st.tuples(kinds, buffers), min_size=1, max_size=6)


def ledger(capacity_bytes: int = 4 << 20) -> Ledger:
    name = f"kv-layout-{os.getpid()}-{next(_numbers)}"
    return Ledger(Device.host(name, capacity_bytes, GRANULE_BYTES))


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(layouts, st.integers(1, 7), st.integers(8, 24))
def test_parts_of_any_layout_are_aligned_apart_and_have_the_declared_shape(
    declared: list[tuple[tuple[str, int, int], list[tuple[str, list[int], str]]]], block: int, granules: int
) -> None:
    layers = [
        LayerSpec(kind, [Buffer(*one) for one in parts], window=window, sinks=sinks)
        for (kind, window, sinks), parts in declared
    ]
    gpu_bytes = granules * GRANULE_BYTES
    kv = ledger().create_kv_cache(layers, block, gpu_bytes)
    cycles, pools = kv.life_cycles, kv.pools()
    assert sorted(layer for cycle in cycles for layer in cycle["layers"]) == list(range(len(layers)))
    assert len({(c["kind"], c["window"], c["sinks"]) for c in cycles}) == len(cycles)
    assert len({pool["page_bytes"] for pool in pools}) == len(pools), "equal pages must share a pool"
    assert sum(-(-p["slots"] * p["page_bytes"] // GRANULE_BYTES) for p in pools) * GRANULE_BYTES <= gpu_bytes
    ranges: dict[int, list[tuple[int, int]]] = {}
    views = []
    for index, cycle in enumerate(cycles):
        pool = pools[cycle["pool"]]
        assert (
            pool["page_bytes"] == cycle["page_bytes"] and pool["page_bytes"] % 16 == 0 and pool["slots"] >= 1
        )
        for layer in cycle["layers"]:
            for role, shape, dtype in declared[layer][1]:
                view = torch.from_dlpack(kv.page_view(layer, role))
                inner = shape if cycle["kind"] == "state" else [block, *shape]
                assert list(view.shape) == [pool["slots"], *inner] and view.dtype == DTYPES[dtype]
                assert view.stride(0) * view.element_size() == pool["page_bytes"]
                assert view[0].is_contiguous() and view.data_ptr() % 16 == 0
                size_bytes = math.prod(inner) * view.element_size()
                ranges.setdefault(index, []).append((view.data_ptr(), view.data_ptr() + size_bytes))
                views.append((index, cycle["pool"], view))
    for index, parts in ranges.items():
        ordered = sorted(parts)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ordered))
        assert ordered[-1][1] - ordered[0][0] <= cycles[index]["page_bytes"]
    # Written through one view, read through it again after all others were written, in the first and last slot.
    for slot in (0, -1):
        for index in range(len(cycles)):
            mine = [view for cycle, _, view in views if cycle == index]
            for number, view in enumerate(mine):
                view[slot] = number + 1
            assert all(bool((view[slot] == number + 1).all()) for number, view in enumerate(mine))


K = Buffer("k", [2, 4], "float16")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ledger().create_kv_cache([], 4, 1 << 20), "at least one layer"),
        (lambda: ledger().create_kv_cache([LayerSpec("full", [K])], 0, 1 << 20), "tokens_per_block"),
        (lambda: ledger().create_kv_cache([LayerSpec("full", [])], 4, 1 << 20), "no buffers"),
        (lambda: ledger().create_kv_cache([LayerSpec("full", [K, K])], 4, 1 << 20), "two buffers"),
        (lambda: ledger().create_kv_cache([LayerSpec("window", [K])], 4, 1 << 20), "give it a window"),
        (lambda: ledger().create_kv_cache([LayerSpec("full", [K], window=4)], 4, 1 << 20), "only"),
        (lambda: ledger().create_kv_cache([LayerSpec("state", [K], sinks=4)], 4, 1 << 20), "only"),
        (
            lambda: ledger().create_kv_cache([LayerSpec("full", [Buffer("", [1], "uint8")])], 4, 1 << 20),
            "role",
        ),
        (
            lambda: ledger().create_kv_cache([LayerSpec("full", [Buffer("k", [], "uint8")])], 4, 1 << 20),
            "shape",
        ),
        (
            lambda: ledger().create_kv_cache([LayerSpec("full", [Buffer("k", [0], "uint8")])], 4, 1 << 20),
            "at least 1",
        ),
        (
            lambda: ledger().create_kv_cache([LayerSpec("full", [Buffer("k", [1 << 62], "uint8")])], 4, 1),
            "1 GiB",
        ),
        (
            lambda: ledger().create_kv_cache(
                [LayerSpec("full", [Buffer("k", [1 << 29], "uint8")] * 1)] * 3, 2, 1
            ),
            "1 GiB",
        ),
        (
            lambda: ledger().create_kv_cache([LayerSpec("full", [K]), LayerSpec("state", [K])], 4, 1 << 16),
            "gpu_bytes",
        ),
        (
            lambda: ledger().create_kv_cache([LayerSpec("full", [K])], 4, 1 << 20, max_utilisation=0.0),
            "utilisation",
        ),
        (
            lambda: ledger().create_kv_cache([LayerSpec("full", [K])], 4, 1 << 20, sequence_tokens=0),
            "sequence_tokens",
        ),
        (lambda: LayerSpec("linear", [K]), "full"),
        (lambda: Buffer("k", [1], "int3"), "float16"),
        (
            lambda: ledger().create_kv_cache([LayerSpec("full", [K])], 4, 1 << 20).page_view(0, "v"),
            "use one of",
        ),
        (
            lambda: ledger().create_kv_cache([LayerSpec("full", [K])], 4, 1 << 20).page_view(1, "k"),
            "does not exist",
        ),
    ],
)
def test_an_impossible_layout_is_refused_with_a_word_on_what_to_do(make: object, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        make()  # type: ignore[operator]


def test_a_refused_cache_takes_no_memory() -> None:
    one = ledger()
    before = one.device.memory_info()
    with pytest.raises(Misuse):
        one.create_kv_cache([LayerSpec("full", [K]), LayerSpec("state", [K])], 4, GRANULE_BYTES)
    assert one.device.memory_info() == before
