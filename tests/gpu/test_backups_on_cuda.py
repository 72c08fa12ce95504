"""Backups of weights that do not change, on a real GPU: made ahead, used by every sleep, forgotten with a change."""

from __future__ import annotations

import pytest
import torch
from gpu.eyes import driver_free_bytes

from torpor.native import Device, Ledger

pytestmark = pytest.mark.gpu
MIB = 1 << 20
SIZE_BYTES = 512 * MIB
SLACK_BYTES = 8 * MIB


def slept_and_woken(ledger: Ledger) -> int:
    """The bytes that the sleep moved. What it gave back another owner has filled in between."""
    free = driver_free_bytes()
    plan = ledger.preflight("sleep", "s", restore={"weights": "pinned"})
    assert plan.refusals == []
    moved: int = ledger.stage(plan, 60.0)["moved_bytes"]
    assert plan.keep_bytes == moved
    ledger.commit()
    ledger.publish()
    assert driver_free_bytes() - free >= SIZE_BYTES - SLACK_BYTES
    torch.full((SIZE_BYTES,), 0xA5, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    ledger.stage(ledger.preflight("wake", "w"), 60.0)
    ledger.commit()
    ledger.publish()
    return moved


def test_a_backup_made_while_awake_leaves_a_sleep_nothing_to_copy_until_the_weights_change_m8_m9() -> None:
    torch.zeros(1, device="cuda")
    ledger = Ledger(Device.cuda(0), host_pool_bytes=SIZE_BYTES)
    region = ledger.create_region("weights", SIZE_BYTES, immutable=True)
    weights = torch.from_dlpack(region)
    weights.random_()
    torch.cuda.synchronize()
    want = weights.to("cpu")
    assert ledger.prefill_backups(60.0) == SIZE_BYTES
    assert ledger.prefill_backups(60.0) == 0
    for _ in range(3):
        assert slept_and_woken(ledger) == 0
        assert torch.equal(weights.to("cpu"), want)
    weights.bitwise_xor_(0x3C)
    torch.cuda.synchronize()
    region.contents_changed()
    assert slept_and_woken(ledger) == SIZE_BYTES
    assert torch.equal(weights.to("cpu"), want.bitwise_xor(0x3C))
    assert ledger.trim_host() == SIZE_BYTES
