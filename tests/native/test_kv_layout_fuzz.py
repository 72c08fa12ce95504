"""Any configuration of a cache, however wild: it is made, or refused in words; nothing crashes and nothing is kept."""

from __future__ import annotations

import gc
import itertools
import os
from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from torpor.native import Buffer, Device, LayerSpec, Ledger, TorporError

GRANULE_BYTES = 64 << 10
CAPACITY_BYTES = 2 << 20
MAX = (1 << 64) - 1
_numbers = itertools.count()

# Around every border: of types, of what a page or a device may have, and small ones that are in order.
sizes = st.one_of(
    st.integers(0, 9),
    st.integers(0, 4 << 20),
    st.integers(0, 63).map(lambda bit: 1 << bit),
    st.sampled_from([MAX, MAX - 1, MAX // 2, (1 << 32) - 1, (1 << 31) + 1]),
)
usual = st.integers(1, 8)
often_usual = st.one_of(*[usual] * 9, sizes)


def words(*known: str) -> st.SearchStrategy[str]:
    """Mostly known ones: else nothing behind the first check would ever be reached."""
    return st.sampled_from([*known * 24, "", "\0", "no such", "ünbekannt"])


buffers = st.tuples(
    words("k", "v"),
    st.lists(often_usual, min_size=1, max_size=3),
    words("float32", "float16", "bfloat16", "uint8"),
)
layers = st.one_of(
    st.tuples(words("full", "state"), st.lists(buffers, min_size=1, max_size=2), st.just(0), st.just(0)),
    st.tuples(st.just("window"), st.lists(buffers, min_size=1, max_size=2), often_usual, often_usual),
    st.tuples(words("full", "window", "state"), st.lists(buffers, max_size=2), often_usual, often_usual),
)
gpu_sizes = st.one_of(st.integers(GRANULE_BYTES, CAPACITY_BYTES), sizes)
options = st.fixed_dictionaries(
    {},
    optional={
        "host_bytes": sizes,
        "sequence_tokens": sizes,
        "max_sequence_tokens": sizes,
        "max_utilisation": st.one_of(st.just(0.5), st.floats()),
        "partial_blocks": st.booleans(),
        "event_count": sizes,
        "seed": sizes,
        "disk_bytes": sizes,
        "cold_gpu_bytes": sizes,
        "codec": words("identity", "checked"),
        "restore": words("none", "memset", "pinned", "disk"),
        "tag": st.text(max_size=3),
        "name": st.text(max_size=3),
    },
)
K = ("k", [2, 4], "float16")


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(layers, min_size=1, max_size=3), often_usual, gpu_sizes, options)
@example([("full", [K], 0, 0)], 4, CAPACITY_BYTES, {"event_count": MAX})
@example([("full", [K], 0, 0)], 4, CAPACITY_BYTES, {"max_sequence_tokens": MAX})
@example([("full", [K], 0, 0)], 4, CAPACITY_BYTES, {"sequence_tokens": MAX})
@example([("full", [K], 0, 0)], 4, CAPACITY_BYTES, {"host_bytes": MAX})
@example([("full", [K], 0, 0)], 4, CAPACITY_BYTES, {"disk_bytes": MAX})
@example([("full", [K], 0, 0)], 4, CAPACITY_BYTES, {"cold_gpu_bytes": MAX})
@example([("full", [K], 0, 0)], 4, MAX, {})
@example([], 4, CAPACITY_BYTES, {})
@example([("full", [], 0, 0)], 4, CAPACITY_BYTES, {})
@example([("full", [K], 0, 0)], MAX, CAPACITY_BYTES, {})
@example([("full", [("k", [1 << 32, 1 << 32], "uint8")], 0, 0)], 4, CAPACITY_BYTES, {})
@example([("window", [K], MAX, MAX)], 4, CAPACITY_BYTES, {})
def test_a_configuration_is_made_or_refused_in_words(
    declared: list[tuple[str, list[tuple[str, list[int], str]], int, int]],
    block: int,
    gpu_bytes: int,
    chosen: dict[str, Any],
) -> None:
    device = Device.host(f"kv-fuzz-{os.getpid()}-{next(_numbers)}", CAPACITY_BYTES, GRANULE_BYTES)
    ledger = Ledger(device)
    try:
        specs = [
            LayerSpec(kind, [Buffer(*one) for one in parts], window=window, sinks=sinks)
            for kind, parts, window, sinks in declared
        ]
        kv = ledger.create_kv_cache(specs, block, gpu_bytes, **chosen)
    except TorporError as refusal:
        assert len(str(refusal)) > 10, "a refusal says what is wrong"
        assert ledger.tags == [] and device.memory_info()[0] == CAPACITY_BYTES
        return
    # What is made can be used: a page of it can be written, and it sleeps and wakes.
    role = declared[0][1][0][0]
    view = torch.from_dlpack(kv.page_view(0, role))
    view[-1] = 1
    assert bool((view[-1] == 1).all())
    sequence = kv.create_sequence("s", list(range(3)))
    if sequence.resume() and sequence.resize(3):
        sequence.commit(list(range(3)))
    for kind in ("sleep", "wake"):
        plan = ledger.preflight(kind, kind, restore=dict.fromkeys(ledger.tags, "none"))
        assert not plan.refusals
        ledger.stage(plan, 30.0)
        ledger.commit()
        ledger.publish()
        assert (device.memory_info()[0] == CAPACITY_BYTES) is (kind == "sleep")
    del view, sequence, kv, ledger
    gc.collect()
    assert device.memory_info()[0] == CAPACITY_BYTES
