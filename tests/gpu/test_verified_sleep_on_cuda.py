"""Preserving sleeps with verification on a real GPU: host memory of both kinds, and disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from torpor.native import Device, Ledger

pytestmark = pytest.mark.gpu
MIB = 1 << 20
TOKENS = list(range(200))


def test_the_kernels_are_there_on_a_machine_with_nvcc() -> None:
    if shutil.which("nvcc") is None:
        pytest.fail("no nvcc here: the kernels were not built, and these tests would pass without them")
    assert Device.cuda(0).kernels == "loaded"


@pytest.mark.parametrize("mode", ["cpu", "pinned", "disk"])
def test_weights_and_cache_come_back_as_their_checksums_say(tmp_path: Path, mode: str) -> None:
    """K3, K13, M1, S1: every byte of 512 MiB of weights and of the live pages, by the mode."""
    torch.zeros(1, device="cuda")
    device = Device.cuda(0)
    ledger = Ledger(device, disk_path=str(tmp_path), disk_bytes=1 << 30)
    weights = torch.from_dlpack(ledger.create_region("weights", 512 * MIB))
    weights.random_()
    want = weights.to("cpu")
    kv = ledger.create_kv_manager(4, 2, 64, "bfloat16", 32, 128 * MIB, 32 * MIB, seed=3)
    sequence = kv.create_sequence("", TOKENS)
    assert sequence.resume() and sequence.resize(len(TOKENS))
    keys = torch.from_dlpack(kv.page_view(1, "k"))
    keys.normal_()
    torch.cuda.synchronize()
    sequence.commit(TOKENS)
    slots = [int(slot) for slot in sequence.page_table if slot >= 0]
    pages = keys[slots].to("cpu")
    free = device.memory_info()[0]

    for kind in ("sleep", "wake"):
        restore = {"weights": mode, "kv_cache": mode} if kind == "sleep" else None
        plan = ledger.preflight(kind, f"{kind}-{mode}", restore=restore, verify=True)
        assert plan.refusals == []
        ledger.stage(plan, 60.0)
        ledger.commit()
        ledger.publish()
        if kind == "sleep":
            assert abs(device.memory_info()[0] - free - 640 * MIB) <= 8 * MIB

    assert torch.equal(weights.to("cpu"), want)
    now = [int(slot) for slot in sequence.page_table if slot >= 0]
    assert now != slots, "the seeded order should have moved the pages (S2)"
    assert torch.equal(keys[now].to("cpu"), pages)
    assert kv.probe("", TOKENS) == 192
