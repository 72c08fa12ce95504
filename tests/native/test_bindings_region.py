"""Region and Ledger from Python: tensors, modes, dictionaries, and the lifetime of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from torpor.native import Device, FaultyDevice, Ledger, Region

MIB = 1 << 20
STAGE_TIMEOUT_S = 30.0


def run(ledger: Ledger, kind: str, **asked: object) -> dict[str, object]:
    plan = ledger.preflight(kind, f"op-{kind}", **asked)
    assert plan.refusals == []
    ledger.stage(plan, STAGE_TIMEOUT_S)
    report = ledger.commit()
    ledger.publish()
    return report


def filled(region: Region) -> torch.Tensor:
    tensor = torch.from_dlpack(region)
    tensor.copy_(torch.arange(region.size_bytes) % 251)
    return tensor


def test_a_region_is_a_torch_tensor_at_its_address(device: Device) -> None:
    region = Ledger(device).create_region("weights", 3 * MIB + 5, name="one")
    tensor = torch.from_dlpack(region)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, (3 * MIB + 5,))
    assert tensor.data_ptr() == region.address
    assert region.__dlpack_device__() == (1, 0)
    assert (region.tag, region.name, region.size_bytes, region.parked) == (
        "weights",
        "one",
        3 * MIB + 5,
        False,
    )


@pytest.mark.parametrize("mode", ["cpu", "pinned"])
def test_contents_and_address_come_back_after_a_preserving_sleep_s1(device: Device, mode: str) -> None:
    ledger = Ledger(device)
    region = ledger.create_region("weights", 5 * MIB)
    tensor = filled(region)
    before = tensor.clone()
    free_awake = device.memory_info()[0]
    slept = run(ledger, "sleep", restore={"weights": mode})
    assert slept["freed_bytes"] == 6 * MIB
    assert device.memory_info()[0] == free_awake + 6 * MIB
    assert ledger.parked_tags == ["weights"]
    assert region.parked
    woken = run(ledger, "wake")
    assert woken["device_bytes"] == 6 * MIB
    assert torch.equal(tensor, before)
    assert tensor.data_ptr() == region.address


def test_memset_reads_zero_after_wake(device: Device) -> None:
    ledger = Ledger(device)
    tensor = filled(ledger.create_region("workspace", 2 * MIB))
    run(ledger, "sleep", restore={"workspace": "memset"})
    run(ledger, "wake")
    assert int(tensor.count_nonzero()) == 0


def test_sleep_of_a_parked_tag_and_wake_of_an_active_one_change_nothing_c1(device: Device) -> None:
    ledger = Ledger(device)
    tensor = filled(ledger.create_region("weights", 2 * MIB))
    before = tensor.clone()
    run(ledger, "wake")
    run(ledger, "sleep", restore={"weights": "cpu"})
    again = ledger.preflight("sleep", "again", restore={"weights": "pinned"})
    assert [(item["noop"], item["mode"], item["keep_bytes"]) for item in again.items] == [(True, "cpu", 0)]
    run(ledger, "sleep", restore={"weights": "pinned"})
    run(ledger, "wake")
    assert torch.equal(tensor, before)


def test_a_tensor_keeps_its_memory_when_region_and_ledger_are_gone(device: Device) -> None:
    free_before = device.memory_info()[0]
    ledger = Ledger(device)
    tensor = filled(ledger.create_region("weights", 2 * MIB))
    del ledger
    gc.collect()
    assert int(tensor[250]) == 250
    assert device.memory_info()[0] == free_before - 2 * MIB
    del tensor
    gc.collect()
    assert device.memory_info()[0] == free_before


def test_memory_and_status_are_plain_dictionaries(device: Device) -> None:
    ledger = Ledger(device)
    ledger.create_region("weights", 2 * MIB)
    ledger.create_region("scales", 100, preserve_always=True)
    assert ledger.tags == ["scales", "weights"]
    assert ledger.status() == {
        "phase": "idle", "operation": None, "kind": None, "mutated": False, "parked_tags": [],
        "evicted": {"pages": 0, "prefix_tokens": 0},
    }  # fmt: skip
    plan = ledger.preflight("sleep", "op-1", restore={"weights": "cpu"})
    assert (plan.kind, plan.operation, plan.free_bytes, plan.keep_bytes) == (
        "sleep",
        "op-1",
        2 * MIB,
        2 * MIB,
    )
    report = ledger.stage(plan, STAGE_TIMEOUT_S)
    assert report["moved_bytes"] == 2 * MIB
    assert report["digest"] == plan.digest
    assert ledger.status()["phase"] == "staged"
    assert ledger.status()["mutated"] is False
    first = ledger.commit()
    assert ledger.status()["phase"] == "committed"
    assert ledger.commit() == first
    ledger.publish()
    scales, weights = ledger.memory()
    assert (weights["device_bytes"], weights["host_bytes"], weights["mode"]) == (0, 2 * MIB, "cpu")
    assert (scales["residual_bytes"], scales["parked"]) == (2 * MIB, True)


def test_a_subclass_runs_its_refresh_hooks_in_the_stage_of_a_wake(device: Device) -> None:
    ledger = Ledger(device)
    tensor = filled(ledger.create_region("weights", 2 * MIB))
    seen: list[int] = []
    ledger.on_refresh(lambda: seen.append(int(tensor[250])))
    run(ledger, "sleep")
    assert seen == []
    run(ledger, "wake")
    assert seen == [250]


def test_a_faulty_device_fails_the_call_it_was_told_to(make_device: Callable[..., Device]) -> None:
    faulty = FaultyDevice(make_device())
    ledger = Ledger(faulty)
    filled(ledger.create_region("weights", 2 * MIB))
    plan = ledger.preflight("sleep", "op")
    calls = faulty.calls
    faulty.fail_at(3)
    with pytest.raises(Exception, match="injected fault in copy"):
        ledger.stage(plan, STAGE_TIMEOUT_S)
    assert faulty.log()[:3] == ["quiesce", "create_host", "copy"]
    assert faulty.calls > calls
    assert ledger.status()["phase"] == "idle"
    run(ledger, "sleep")
