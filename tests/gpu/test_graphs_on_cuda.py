"""Captured graphs over sleep and wake: those of others, pages that moved, and counters on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu.eyes import driver_free_bytes
from gpu.transactions import transact

from torpor.native import Device, Ledger

pytestmark = pytest.mark.gpu
MIB = 1 << 20
GIB = 1 << 30
MODES = ["none", "memset", "cpu", "pinned", "disk"]
KEPT = ("cpu", "pinned", "disk")


def ledger_of(folder: Path) -> Ledger:
    torch.zeros(1, device="cuda")
    return Ledger(Device.cuda(0), host_pool_bytes=GIB, disk_path=str(folder), disk_bytes=GIB)


def spoil(size_bytes: int) -> None:
    """What the sleep gave back is used by another owner, and comes back full of it."""
    torch.full((size_bytes,), 0xA5, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_captured_outside_by_torchs_defaults_stays_right_s1(tmp_path: Path, mode: str) -> None:
    """Its scratch lies in a graph pool that torch has made by itself; it reads a region of ours."""
    ledger = ledger_of(tmp_path)
    region = ledger.create_region("weights", 256 * MIB)
    weights = torch.from_dlpack(region).view(torch.float32).view(-1, 1024)
    weights.fill_(2.0)
    x, out = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step() -> None:
        hidden = torch.mv(weights[:1024], x)  # scratch
        scratch = hidden.repeat(4096).view(4096, 1024) + 1.0  # 16 MiB of it
        out.copy_(scratch[4095] * 0.5)
        counter.add_(1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    counter.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for cycle in range(3):
        before = driver_free_bytes()
        transact(ledger, "sleep", {"weights": mode})
        assert driver_free_bytes() - before >= 248 * MIB
        spoil(256 * MIB)
        transact(ledger, "wake")
        if mode == "none":
            weights.fill_(2.0)
        x.fill_(float(cycle + 1))
        graph.replay()
        torch.cuda.synchronize()
        weight = 0.0 if mode == "memset" else 2.0
        want = (weight * 1024 * (cycle + 1) + 1.0) * 0.5
        assert torch.equal(out, torch.full_like(out, want))
        assert counter.item() == cycle + 1
    del graph


@pytest.mark.parametrize("mode", MODES)
def test_a_counter_that_a_graph_keeps_on_the_device_is_as_the_mode_says_f15_s3(
    tmp_path: Path, mode: str
) -> None:
    """One counter sleeps by the mode, the other one is kept always."""
    ledger = ledger_of(tmp_path)
    sleeping = torch.from_dlpack(ledger.create_region("counters", 4 * MIB)).view(torch.int64)
    staying = torch.from_dlpack(
        ledger.create_region("counters", 2 * MIB, name="control", preserve_always=True)
    ).view(torch.int64)
    sleeping.zero_()
    staying.zero_()
    sleeping[7:8].add_(1)  # loads the kernel
    sleeping.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sleeping[7:8].add_(1)
        staying[9:10].add_(1)
    expected = 0
    for cycle in range(4):
        before = driver_free_bytes()
        transact(ledger, "sleep", {"counters": mode})
        assert driver_free_bytes() > before
        spoil(64 * MIB)
        transact(ledger, "wake")
        if mode not in KEPT:
            expected = 0
        if mode == "none":
            sleeping.zero_()  # its contents are undefined
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        expected += 2
        assert int(sleeping[7]) == expected and int(sleeping.sum()) == expected
        assert int(staying[9]) == 2 * (cycle + 1) and int(staying.sum()) == 2 * (cycle + 1)
    del graph


@pytest.mark.parametrize("mode", ["pinned", "cpu", "disk"])
def test_a_graph_reads_a_page_whose_slot_has_changed_s1_s2_k3(tmp_path: Path, mode: str) -> None:
    """The graph finds pages by a table at a fixed address, which a refresh hook rewrites in every wake's stage."""
    ledger = ledger_of(tmp_path)
    kv = ledger.create_kv_manager(2, 2, 64, "float32", 32, 64 * MIB, 32 * MIB, seed=11)
    tokens = list(range(500, 500 + 256))
    sequence = kv.create_sequence("", tokens)
    assert sequence.resume() and sequence.resize(len(tokens))
    keys = torch.from_dlpack(kv.page_view(1, "k"))
    count = int((sequence.page_table >= 0).sum())
    table = torch.from_dlpack(ledger.create_region("tables", 2 * MIB, preserve_always=True)).view(torch.int64)
    out = torch.empty((count, *keys.shape[1:]), device="cuda")

    def refresh() -> None:
        slots = sequence.page_table
        table[:count].copy_(torch.from_numpy(slots[slots >= 0].astype("int64")))

    refresh()
    keys.normal_()
    torch.index_select(keys, 0, table[:count], out=out)  # loads the kernel
    want = out.clone()
    torch.cuda.synchronize()
    sequence.commit(tokens)
    ledger.on_refresh(refresh)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.index_select(keys, 0, table[:count], out=out)
    moved = 0
    for _ in range(3):
        then = sequence.page_table.copy()
        transact(ledger, "sleep", {"kv_cache": mode}, tags=["kv_cache"])
        spoil(64 * MIB)
        transact(ledger, "wake")
        moved += int((sequence.page_table != then).sum())
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
    assert moved > 0, "no page has another slot: nothing was tested"
    del graph
