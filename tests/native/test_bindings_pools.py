"""Pools that change, over the bindings: sizes, views, refusals (K12, S1)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torpor.native import Buffer, Device, KvManager, LayerSpec, Ledger, Misuse, OutOfDeviceMemory

GRANULE_BYTES = 64 << 10
LAYERS = [
    LayerSpec("full", [Buffer("k", [512], "float32")]),
    LayerSpec("state", [Buffer("ssm", [1024], "float32")]),
]


@pytest.fixture
def ledger(make_device: Callable[..., Device]) -> Ledger:
    return Ledger(make_device(16 * GRANULE_BYTES, GRANULE_BYTES))


def cache(ledger: Ledger) -> KvManager:
    return ledger.create_kv_cache(
        LAYERS, 4, 8 * GRANULE_BYTES, sequence_tokens=32, max_gpu_bytes=12 * GRANULE_BYTES
    )


def test_pools_change_at_unchanged_addresses_and_new_views_show_the_new_slots_k12_s1(ledger: Ledger) -> None:
    kv = cache(ledger)
    view = torch.from_dlpack(kv.page_view(0, "k"))
    sequence = kv.create_sequence("one", [1] * 9)
    assert sequence.resume() and sequence.resize(8)
    view[sequence.page_table[0]] = 7.0
    sequence.commit([1] * 8)
    sequence.suspend()
    rows = kv.resize_pools([10 * GRANULE_BYTES, 2 * GRANULE_BYTES])
    assert [row["size_bytes"] for row in rows] == [10 * GRANULE_BYTES, 2 * GRANULE_BYTES]
    assert [row["slots"] for row in rows] == [80, 32] and rows == kv.pools()
    assert ledger.device.memory_info()[0] == 4 * GRANULE_BYTES
    grown = torch.from_dlpack(kv.page_view(0, "k"))
    assert grown.shape[0] == 80 and grown.data_ptr() == view.data_ptr()
    assert sequence.resume() and bool((grown[sequence.page_table[0]] == 7.0).all())
    with pytest.raises(Misuse, match="active; suspend"):
        kv.rebalance()
    sequence.suspend()
    rows = kv.rebalance([1, 1])
    assert [row["size_bytes"] for row in rows] == [6 * GRANULE_BYTES, 6 * GRANULE_BYTES]
    assert sum(row["size_bytes"] for row in kv.resize_pools(4 * GRANULE_BYTES)) == 4 * GRANULE_BYTES
    assert ledger.device.memory_info()[0] == 12 * GRANULE_BYTES
    assert sequence.resume() and bool((grown[sequence.page_table[0]] == 7.0).all())


def test_what_cannot_be_is_refused_with_a_way_out_k12(ledger: Ledger) -> None:
    kv = cache(ledger)
    other = ledger.create_region("weights", 5 * GRANULE_BYTES)
    for sizes, words in (
        ([GRANULE_BYTES], "give one a pool"),
        ([GRANULE_BYTES, 0], "give it more"),
        ([13 * GRANULE_BYTES, GRANULE_BYTES], "higher max_gpu_bytes"),
    ):
        with pytest.raises(Misuse, match=words):
            kv.resize_pools(sizes)
    with pytest.raises(OutOfDeviceMemory) as caught:
        kv.resize_pools([11 * GRANULE_BYTES, GRANULE_BYTES])
    assert caught.value.needed_bytes > caught.value.free_bytes
    assert ledger.device.memory_info()[0] == 3 * GRANULE_BYTES
    ledger.stage(ledger.preflight("sleep", "op", ["weights"], {"weights": "none"}), 10.0)
    with pytest.raises(Misuse, match=r"finish it .* or abort"):
        kv.rebalance([1, 1])
    ledger.commit()
    ledger.publish()
    assert other.parked
    with pytest.raises(Misuse, match="'weights' is asleep; wake"):
        kv.resize_pools(4 * GRANULE_BYTES)
