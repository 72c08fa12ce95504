"""Hundreds of cycles on a real GPU leave everything where it was, by the driver's and the kernel's word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu.eyes import driver_free_bytes, mappings, open_files, process_bytes
from gpu.transactions import transact
from support.kept_rows import keep_row

from torpor.native import Device, KvManager, Ledger, Sequence

pytestmark = pytest.mark.gpu
MIB = 1 << 20
CYCLES, SETTLED = 200, 20  # in the first ones, pools fill and libraries load
WEIGHTS_BYTES, KV_BYTES = 256 * MIB, 128 * MIB
SLACK_BYTES = 4 * MIB  # what the driver may round
HOST_SLACK_BYTES = 48 * MIB
MODES = ("pinned", "none", "memset", "cpu", "disk")
TOKENS = list(range(200))


def live(kv: KvManager) -> Sequence:
    """A sequence with pages that count, suspended."""
    sequence = kv.create_sequence("", TOKENS)
    assert sequence.resume() and sequence.resize(len(TOKENS))
    torch.from_dlpack(kv.page_view(1, "k")).fill_(1.5)
    torch.cuda.synchronize()
    sequence.commit(TOKENS)
    sequence.suspend()
    return sequence


def seen() -> dict[str, int]:
    return {
        "rss_bytes": process_bytes("VmRSS"),
        "address_bytes": process_bytes("VmSize"),
        "files": open_files(),
        "mappings": mappings(),
    }


def test_200_cycles_leave_device_host_files_and_addresses_where_they_were_m1_m2(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    ledger = Ledger(Device.cuda(0), host_pool_bytes=512 * MIB, disk_path=str(tmp_path), disk_bytes=1024 * MIB)
    weights = torch.from_dlpack(ledger.create_region("weights", WEIGHTS_BYTES)).view(torch.int32)
    kv = ledger.create_kv_manager(4, 2, 64, "bfloat16", 32, KV_BYTES, 32 * MIB, seed=5)
    sequence = live(kv)
    torch.cuda.empty_cache()
    awake_bytes = driver_free_bytes()
    asleep: list[int] = []
    awake: list[int] = []
    settled: dict[str, int] = {}
    for number in range(CYCLES):
        mode = MODES[number % len(MODES)]
        weights.fill_(number)
        torch.cuda.synchronize()
        transact(ledger, "sleep", {"weights": mode, "kv_cache": "pinned" if mode == "pinned" else "none"})
        asleep.append(driver_free_bytes() - awake_bytes)
        transact(ledger, "wake")
        awake.append(driver_free_bytes() - awake_bytes)
        if mode not in ("none", "memset"):
            assert int(weights[0]) == int(weights[-1]) == number
        elif mode == "memset":
            assert not weights.any()
        if mode != "pinned":  # discarded: made anew
            sequence.close()
            sequence = live(kv)
        if number + 1 == SETTLED:
            settled = seen()
    ended = seen()
    keep_row(
        "cycles",
        ("device",),
        {
            "device": "cuda",
            "cycles": CYCLES,
            "promised_bytes": WEIGHTS_BYTES + KV_BYTES,
            "freed_asleep_bytes": [min(asleep), max(asleep)],
            "left_awake_bytes": [min(awake), max(awake)],
            "settled": settled,
            "ended": ended,
        },
        "Free bytes by the driver, relative to the beginning, [least, most] of all cycles; the rest by the kernel.",
    )
    assert all(abs(freed - WEIGHTS_BYTES - KV_BYTES) <= SLACK_BYTES for freed in asleep)
    assert all(abs(left) <= SLACK_BYTES for left in awake)
    assert ended["files"] == settled["files"]
    assert ended["mappings"] <= settled["mappings"] + 8
    for key in ("rss_bytes", "address_bytes"):
        assert ended[key] <= settled[key] + HOST_SLACK_BYTES, key
