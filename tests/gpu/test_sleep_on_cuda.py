"""Sleep and wake on a real GPU, with cuda-python as an independent eye on the driver."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu.eyes import driver_free_bytes
from gpu.transactions import transact

from torpor.native import Device, DeviceBusy, Ledger

pytestmark = pytest.mark.gpu
MIB = 1 << 20
SLACK_BYTES = 8 * MIB  # what the driver itself may move


@pytest.fixture
def device() -> Iterator[Device]:
    torch.zeros(1, device="cuda")  # the primary context, shared by torch, torpor and cuda-python
    yield Device.cuda(0)


@pytest.mark.parametrize("mode", ["none", "memset", "cpu", "pinned", "disk"])
def test_the_driver_has_the_bytes_back_while_a_region_sleeps(
    device: Device, mode: str, tmp_path: Path
) -> None:
    """M1, S1 and the restore modes, on 1 GiB."""
    ledger = Ledger(device, disk_path=str(tmp_path), disk_bytes=1024 * MIB)
    region = ledger.create_region("weights", 1024 * MIB)
    tensor = torch.from_dlpack(region).view(torch.float32)
    tensor.copy_(torch.arange(tensor.numel(), device="cuda") % 1021)
    want = tensor.double().sum().item()
    torch.cuda.synchronize()
    before = driver_free_bytes()

    transact(ledger, "sleep", restore={"weights": mode})
    assert abs(driver_free_bytes() - before - 1024 * MIB) <= SLACK_BYTES
    transact(ledger, "wake")

    assert abs(driver_free_bytes() - before) <= SLACK_BYTES
    assert tensor.data_ptr() == region.address
    if mode == "memset":
        assert not tensor.any()
    elif mode != "none":
        assert tensor.double().sum().item() == want
        assert torch.equal(tensor, (torch.arange(tensor.numel(), device="cuda") % 1021).float())


def test_the_kv_cache_comes_back_byte_for_byte_on_the_gpu(device: Device) -> None:
    """K3, K4: only live pages are kept, and the same prefix matches again."""
    ledger = Ledger(device)
    kv = ledger.create_kv_manager(4, 2, 64, "bfloat16", 32, 256 * MIB, 64 * MIB, seed=7)
    tokens = list(range(100, 100 + 129))
    sequence = kv.create_sequence("", tokens)
    assert sequence.resume() and sequence.resize(len(tokens))
    slots = torch.from_dlpack(kv.page_view(0, "k")).shape[0]
    assert slots == kv.slots
    table = [int(slot) for slot in sequence.page_table if slot >= 0]
    pages = {}
    for index, slot in enumerate(table):
        for layer in range(4):
            for role in ("k", "v"):
                page = torch.from_dlpack(kv.page_view(layer, role))[slot]
                page.normal_()
                pages[index, layer, role] = page.to("cpu")
    torch.cuda.synchronize()
    sequence.commit(tokens)
    matched = kv.probe("", tokens)
    assert matched == 128

    sequence.suspend()
    report = transact(ledger, "sleep", restore={"kv_cache": "pinned"})
    assert report["freed_bytes"] == 256 * MIB
    transact(ledger, "wake")
    assert kv.probe("", tokens) == matched
    assert sequence.resume()
    for index, slot in enumerate(int(slot) for slot in sequence.page_table if slot >= 0):
        for layer in range(4):
            for role in ("k", "v"):
                now = torch.from_dlpack(kv.page_view(layer, role))[slot]
                assert torch.equal(now.to("cpu"), pages[index, layer, role])


def test_a_kernel_still_running_is_waited_for_and_past_the_deadline_nothing_has_changed(
    device: Device,
) -> None:
    """M5, F16: two seconds of work on a side stream when sleep comes."""
    ledger = Ledger(device)
    region = ledger.create_region("weights", 256 * MIB)
    tensor = torch.from_dlpack(region)
    tensor.fill_(6).add_(1)  # also loads the kernels: a load waits for all that runs
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    free = driver_free_bytes()
    side = torch.cuda.Stream()
    began = time.monotonic()
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(2.0 * torch.cuda.get_device_properties(0).clock_rate * 1000))
        tensor.add_(1)
    plan = ledger.preflight("sleep", "s")
    assert not side.query(), "nothing runs: nothing would be tested"
    with pytest.raises(DeviceBusy):
        ledger.stage(plan, 0.3)
    assert time.monotonic() - began < 1.5, "the deadline was not kept"
    assert abs(driver_free_bytes() - free) <= SLACK_BYTES
    assert ledger.status()["phase"] == "idle"

    ledger.stage(plan, 30.0)
    assert side.query(), "staged while the kernel was still running"
    ledger.commit()
    ledger.publish()
    transact(ledger, "wake")
    assert bool((tensor == 8).all()), "the kernel's work was lost"
