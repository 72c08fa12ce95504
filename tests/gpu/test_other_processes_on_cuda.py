"""Another process on the same GPU: what is given back is really there for it, and what it has is missing for us."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu.eyes import driver_free_bytes
from gpu.taker import OUT_OF_MEMORY, Taker
from gpu.transactions import transact

from torpor.native import Device, FaultyDevice, Ledger, OutOfDeviceMemory, TorporError

pytestmark = pytest.mark.gpu
MIB = 1 << 20
GIB = 1 << 30
SLACK_BYTES = 8 * MIB


@pytest.fixture
def taker() -> Iterator[Taker]:
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()  # what earlier tests left in torch's cache would not be there to take
    with Taker() as other:
        yield other


def filled(ledger: Ledger, names: str, size_bytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Regions of these names, one letter each: (the tensor, its contents now)."""
    pairs = []
    for name in names:
        tensor = torch.from_dlpack(ledger.create_region("weights", size_bytes, name=name))
        tensor.random_()
        pairs.append((tensor, tensor.to("cpu")))
    torch.cuda.synchronize()
    return pairs


@pytest.mark.parametrize("mode", ["none", "pinned"])
def test_bytes_that_were_promised_are_there_for_another_process_at_once_f9_m1(
    taker: Taker, mode: str
) -> None:
    ledger = Ledger(Device.cuda(0), host_pool_bytes=4 * GIB)
    ledger.create_region("weights", 4 * GIB)
    for _ in range(3):
        assert taker.take(taker.free_bytes() - 512 * MIB) == 0
        assert taker.take(4 * GIB) == OUT_OF_MEMORY, "the rest should be too small, or nothing is tested"
        report = transact(ledger, "sleep", {"weights": mode})
        assert report["freed_bytes"] == 4 * GIB
        assert taker.take(report["freed_bytes"]) == 0
        taker.give()
        transact(ledger, "wake")


def test_a_wake_waits_for_memory_that_another_process_has_ten_times_m4_f5(taker: Taker) -> None:
    """Refused with the bytes needed and free, nothing leaks, and the contents come back in the end."""
    ledger = Ledger(Device.cuda(0))
    regions = filled(ledger, "abcd", 512 * MIB)
    transact(ledger, "sleep", {"weights": "pinned"}, verify=True)
    free = driver_free_bytes()
    for _ in range(10):
        # Three of the four regions would find room.
        assert taker.take(taker.free_bytes() - 1664 * MIB) == 0
        plan = ledger.preflight("wake", "wake")
        (refusal,) = plan.refusals
        assert refusal["code"] == "device_memory"
        assert refusal["needed_bytes"] >= 4 * 512 * MIB
        assert abs(refusal["free_bytes"] - driver_free_bytes()) <= SLACK_BYTES
        with pytest.raises(OutOfDeviceMemory) as caught:
            ledger.stage(plan, 30.0)
        assert caught.value.needed_bytes > caught.value.free_bytes > 0
        assert ledger.status()["phase"] == "idle" and ledger.parked_tags == ["weights"]
        taker.give()
        assert abs(driver_free_bytes() - free) <= SLACK_BYTES
    transact(ledger, "wake")
    assert all(torch.equal(tensor.to("cpu"), want) for tensor, want in regions)


def test_a_wake_whose_every_device_call_fails_once_leaks_nothing_and_loses_nothing_f26_m3() -> None:
    """The k-th call of the stage fails, for every k: also when the last of four regions is mapped."""
    torch.zeros(1, device="cuda")
    device = FaultyDevice(Device.cuda(0))
    ledger = Ledger(device, host_pool_bytes=GIB)
    regions = filled(ledger, "abcd", 64 * MIB)
    transact(ledger, "sleep", {"weights": "pinned"}, verify=True)
    free = driver_free_bytes()
    failed = 0
    while True:
        plan = ledger.preflight("wake", "wake")
        device.fail_at(failed + 1)
        try:
            ledger.stage(plan, 30.0)
            break
        except TorporError:
            failed += 1
        finally:
            device.fail_at(0)
        assert ledger.parked_tags == ["weights"]
        assert abs(driver_free_bytes() - free) <= SLACK_BYTES
    assert failed >= 8, "four regions take more calls than that"
    ledger.commit()
    ledger.publish()
    assert all(torch.equal(tensor.to("cpu"), want) for tensor, want in regions)
