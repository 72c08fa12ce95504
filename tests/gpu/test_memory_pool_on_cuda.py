"""Torch's own allocations in memory that sleeps: modules, captured graphs, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu.eyes import driver_free_bytes
from gpu.transactions import transact

from torpor.native import Device, Ledger, MemoryPool, MemorySaver, Misuse

pytestmark = pytest.mark.gpu
MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize("mode", ["none", "memset", "cpu", "pinned"])
def test_a_graph_whose_pool_slept_replays_right_after_wake_in_every_mode_s1_s3_f15(mode: str) -> None:
    ledger = Ledger(Device.cuda(0))
    pool = MemoryPool(ledger, f"graph-{mode}", 8 * GIB)
    kept = torch.from_dlpack(ledger.create_region(f"static-{mode}", MIB, preserve_always=True)).view(
        torch.float32
    )
    static_in, counter, out = kept[:1024], kept[1024:1025], kept[2048:3072]
    kept.zero_()
    weight = torch.randn(1024, 1024, device="cuda")

    def step() -> None:
        hidden = torch.relu(weight @ static_in)  # scratch, in the graph's pool
        big = hidden.repeat(8192).view(8192, 1024) * 2.0
        out.copy_(big[17] + hidden)
        counter.add_(1)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    counter.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        step()
    assert pool.arena.mapped_bytes >= 32 * MIB, "the capture should have taken its scratch from the pool"
    before = driver_free_bytes()
    for cycle in range(3):
        transact(ledger, "sleep", {f"graph-{mode}": mode}, verify=True)
        assert driver_free_bytes() - before >= 32 * MIB
        transact(ledger, "wake")
        static_in.copy_(torch.randn(1024, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.allclose(out, 3.0 * torch.relu(weight @ static_in), rtol=1e-4, atol=1e-3)
        assert counter.item() == cycle + 1
    del graph


def test_a_module_made_in_a_pool_keeps_its_contents_and_what_lies_outside_is_named_f28() -> None:
    ledger = Ledger(Device.cuda(0), host_pool_bytes=GIB)
    pool = MemoryPool(ledger, "weights-pool", 8 * GIB, restore="pinned")
    outside = torch.nn.Linear(64, 64, device="cuda")
    with pool.use():
        module = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, device="cuda") for _ in range(8)])
    pool.check(module)
    with pytest.raises(Misuse, match="outside the pool"):
        pool.check(torch.nn.Sequential(module, outside))
    want = [parameter.detach().cpu() for parameter in module.parameters()]
    before = driver_free_bytes()
    transact(ledger, "sleep", verify=True)
    assert driver_free_bytes() - before >= 8 * 2048 * 2048 * 4
    transact(ledger, "wake")
    assert all(torch.equal(now.cpu(), then) for now, then in zip(module.parameters(), want, strict=True))
    assert abs(driver_free_bytes() - before) <= 4 * MIB
    del module


def test_a_pool_that_is_asleep_gives_no_memory_and_says_why() -> None:
    ledger = Ledger(Device.cuda(0))
    pool = MemoryPool(ledger, "dozing", GIB)
    with pool.use():
        first = torch.ones(4 * MIB, dtype=torch.uint8, device="cuda")
    transact(ledger, "sleep", verify=True)
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught, pool.use():
        torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    assert any("asleep" in note for note in caught.value.__notes__)
    transact(ledger, "wake")
    with pool.use():
        second = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    assert int(second.sum()) == 64 * MIB
    del first, second


def test_pause_and_resume_by_tag_move_only_that_tag() -> None:
    saver = MemorySaver(Ledger(Device.cuda(0)), reserve_bytes=8 * GIB)
    with saver.region("kept", restore="pinned"):
        kept = torch.arange(16 * MIB, device="cuda")
    with saver.region("dropped"):
        dropped = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    before = driver_free_bytes()
    assert saver.pause("dropped") >= 256 * MIB
    assert driver_free_bytes() - before >= 256 * MIB
    assert int(kept.sum()) == (16 * MIB) * (16 * MIB - 1) // 2
    assert saver.pause() >= 128 * MIB
    assert saver.pause() == 0
    assert saver.resume() >= 384 * MIB
    assert int(kept.sum()) == (16 * MIB) * (16 * MIB - 1) // 2
    dropped.fill_(3)
    assert int(dropped[-1]) == 3
    with pytest.raises(Misuse, match="no tag 'other'"):
        saver.pause("other")
    del kept, dropped


def test_expandable_segments_are_refused_with_the_mend() -> None:
    program = (
        "from torpor.native import Device, Ledger, MemoryPool\n"
        "MemoryPool(Ledger(Device.cuda(0)), 'x', 1 << 30)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={
            "PYTHONPATH": str(Path("build/py").resolve()),
            "PATH": "/usr/bin:/bin",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0 and "take expandable_segments out" in run.stderr
