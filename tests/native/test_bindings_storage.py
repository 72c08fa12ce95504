"""Disk, checksums and host pools from Python."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torpor.native import (
    ContentsCorrupt,
    Device,
    DeviceBusy,
    DeviceEvent,
    FaultyDevice,
    HostPool,
    Ledger,
    OutOfDisk,
    Region,
)

MIB = 1 << 20
STAGE_TIMEOUT_S = 30.0


def run(ledger: Ledger, kind: str, verify: bool = False, **asked: object) -> None:
    plan = ledger.preflight(kind, f"op-{kind}", verify=verify, **asked)
    assert plan.refusals == []
    ledger.stage(plan, STAGE_TIMEOUT_S)
    ledger.commit()
    ledger.publish()


def filled(region: Region) -> torch.Tensor:
    tensor = torch.from_dlpack(region)
    tensor.copy_(torch.arange(region.size_bytes) % 251)
    return tensor


def test_contents_sleep_in_a_file_without_a_name_k3(device: Device, tmp_path: Path) -> None:
    ledger = Ledger(device, disk_path=str(tmp_path), disk_bytes=16 * MIB)
    tensor = filled(ledger.create_region("weights", 5 * MIB, restore="disk"))
    before = tensor.clone()
    assert ledger.preflight("sleep", "op").disk_bytes == 5 * MIB
    run(ledger, "sleep")
    (row,) = ledger.memory()
    assert (row["mode"], row["disk_bytes"], row["host_bytes"]) == ("disk", 5 * MIB, 0)
    assert list(tmp_path.iterdir()) == []
    run(ledger, "wake")
    assert torch.equal(tensor, before)
    assert ledger.memory()[0]["disk_bytes"] == 0


def test_a_full_disk_is_refused_with_numbers(device: Device, tmp_path: Path) -> None:
    ledger = Ledger(device, disk_path=str(tmp_path), disk_bytes=MIB)
    ledger.create_region("weights", 5 * MIB, restore="disk")
    plan = ledger.preflight("sleep", "op")
    assert [row["code"] for row in plan.refusals] == ["disk"]
    with pytest.raises(OutOfDisk) as caught:
        ledger.stage(plan, STAGE_TIMEOUT_S)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (5 * MIB, MIB)


def test_a_saved_copy_that_went_bad_fails_the_wake_and_names_its_tag_k13(
    make_device: Callable[..., Device],
) -> None:
    faulty = FaultyDevice(make_device())
    ledger = Ledger(faulty)
    region = ledger.create_region("weights", 2 * MIB)
    filled(region)
    faulty.corrupt_copy(1)
    run(ledger, "sleep", verify=True)
    plan = ledger.preflight("wake", "op", verify=True)
    with pytest.raises(ContentsCorrupt, match="restore mode none") as caught:
        ledger.stage(plan, STAGE_TIMEOUT_S)
    assert caught.value.tag == "weights"
    assert region.parked
    assert ledger.status()["phase"] == "idle"


def test_ledgers_of_one_device_share_a_pool_that_can_be_trimmed_m8(device: Device) -> None:
    pool = HostPool(device, 6 * MIB)
    ledgers = [Ledger(device, host_pool=pool) for _ in range(2)]
    for ledger in ledgers:
        filled(ledger.create_region("weights", 4 * MIB))
        run(ledger, "sleep")
        run(ledger, "wake")
        assert pool.idle_bytes == 4 * MIB  # the second ledger used what the first one left
    assert pool.trim(5 * MIB) == 0
    assert pool.trim() == 4 * MIB
    assert (pool.idle_bytes, pool.retained_bytes, pool.bound_bytes) == (0, 0, 6 * MIB)


def test_zero_on_wake_and_a_wake_without_recorded_checksums(device: Device) -> None:
    ledger = Ledger(device)
    tensor = filled(ledger.create_region("workspace", 2 * MIB, zero_on_wake=True))
    run(ledger, "sleep")
    (refusal,) = ledger.preflight("wake", "op", verify=True).refusals
    assert (refusal["code"], refusal["tag"]) == ("refused", "workspace")
    run(ledger, "wake")
    run(ledger, "sleep", restore={"workspace": "none"})
    run(ledger, "wake")
    assert int(tensor.count_nonzero()) == 0


def test_a_sleep_does_not_move_memory_under_work_that_holds_an_event_m5(device: Device) -> None:
    ledger = Ledger(device)
    region = ledger.create_region("weights", 2 * MIB)
    with DeviceEvent(device), pytest.raises(DeviceBusy, match="in flight"):
        ledger.stage(ledger.preflight("sleep", "op"), 0.05)
    assert not region.parked
    run(ledger, "sleep")


def test_a_backup_made_ahead_is_given_back_on_request_m8_m9(device: Device) -> None:
    ledger = Ledger(device, host_pool_bytes=8 * MIB)
    filled(ledger.create_region("weights", 4 * MIB, immutable=True))
    assert ledger.prefill_backups(10.0) == 4 * MIB
    assert ledger.preflight("sleep", "op").keep_bytes == 0
    assert ledger.trim_host() == 4 * MIB
    assert ledger.preflight("sleep", "op").keep_bytes == 4 * MIB


def test_a_backup_takes_no_more_host_memory_than_there_is_room_for_m8(device: Device) -> None:
    ledger = Ledger(device, host_pool_bytes=8 * MIB)
    filled(ledger.create_region("weights", 4 * MIB, name="large", immutable=True))
    filled(ledger.create_region("weights", 1 * MIB, name="small", immutable=True))
    assert ledger.prefill_backups(10.0, room_bytes=4 * MIB - 1) == 1 * MIB
    assert ledger.prefill_backups(10.0, room_bytes=4 * MIB) == 4 * MIB


def test_a_pool_filled_ahead_holds_what_the_next_sleep_takes_and_no_more_than_its_bound_m8(
    device: Device,
) -> None:
    ledger = Ledger(device, host_pool_bytes=4 * MIB)
    filled(ledger.create_region("weights", 2 * MIB))
    filled(ledger.create_region("scratch", 2 * MIB, restore="none"))
    assert ledger.fill_host_pool(10.0, room_bytes=2 * MIB - 1) == 0
    assert ledger.fill_host_pool(10.0) == ledger.host_idle_bytes == 2 * MIB
    assert ledger.fill_host_pool(10.0) == 0
    plan = ledger.preflight("sleep", "op")
    assert (plan.keep_bytes, plan.host_bytes) == (2 * MIB, 0)
    filled(ledger.create_region("more", 3 * MIB))
    assert (ledger.fill_host_pool(10.0), ledger.host_idle_bytes) == (0, 2 * MIB)


def test_contents_that_change_while_their_backup_is_made_are_saved_as_they_are_then_m9() -> None:
    faulty = FaultyDevice(Device.host(f"test-{uuid.uuid4().hex[:12]}", 256 * MIB))
    ledger = Ledger(faulty, host_pool_bytes=256 * MIB)
    region = ledger.create_region("weights", 130 * MIB, immutable=True)  # three pieces
    tensor = filled(region)
    faulty.delay("copy", 0.05)
    thread = threading.Thread(target=ledger.prefill_backups, args=(60.0,))
    thread.start()
    for _ in range(5):
        tensor.add_(1)
        region.contents_changed()
        assert ledger.memory()[0]["tag"] == "weights"
        time.sleep(0.02)
    thread.join()
    want = tensor.clone()
    plan = ledger.preflight("sleep", "op")
    assert plan.keep_bytes == 0, "it went on until all was saved"
    run(ledger, "sleep")
    run(ledger, "wake")
    assert torch.equal(tensor, want)


def test_nothing_is_made_ahead_any_more_once_it_was_stopped(device: Device) -> None:
    ledger = Ledger(device, host_pool_bytes=8 * MIB)
    filled(ledger.create_region("weights", 4 * MIB, immutable=True))
    ledger.stop_prefilling()
    assert (ledger.prefill_backups(10.0), ledger.fill_host_pool(10.0)) == (0, 0)
    run(ledger, "sleep")


def test_a_registration_is_a_context_manager_k10(device: Device) -> None:
    ledger = Ledger(device)
    ledger.create_region("kv_cache", 2 * MIB)
    with ledger.register_external("nixl"):
        assert ledger.registrations == ["nixl"]
        assert ledger.preflight("sleep", "op").refusals
    assert ledger.registrations == []
    assert not ledger.preflight("sleep", "op").refusals
