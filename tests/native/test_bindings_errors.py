"""Every refusal reaches Python as the class of torpor.native.errors, with its attributes and a way out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from torpor.native import (
    Device,
    DeviceBusy,
    DeviceError,
    FaultyDevice,
    HostPool,
    Ledger,
    Misuse,
    OutOfDeviceMemory,
    OutOfMemory,
    Stopped,
    TorporError,
    cuda_device_count,
)

MIB = 1 << 20


def test_a_region_that_does_not_fit_says_what_is_needed_and_free(device: Device) -> None:
    ledger = Ledger(device)
    with pytest.raises(OutOfDeviceMemory, match=r"needed .*, free .*host device") as caught:
        ledger.create_region("weights", 128 * MIB)
    # Regions are mapped in chunks: the one that was refused is named, and what came before is given back.
    assert caught.value.needed_bytes > caught.value.free_bytes
    assert isinstance(caught.value, OutOfMemory)
    assert isinstance(caught.value, TorporError)
    assert device.memory_info() == (64 * MIB, 64 * MIB)
    assert ledger.tags == []


def test_a_wake_without_room_is_refused_with_numbers_and_keeps_the_contents_m4(device: Device) -> None:
    ledger = Ledger(device)
    region = ledger.create_region("weights", 40 * MIB, restore="none")
    ledger.stage(ledger.preflight("sleep", "s"), 10.0)
    ledger.commit()
    ledger.publish()
    other = Ledger(device)
    other.create_region("weights", 40 * MIB)
    plan = ledger.preflight("wake", "w")
    (refusal,) = plan.refusals
    assert refusal["code"] == "device_memory"
    assert (refusal["needed_bytes"], refusal["free_bytes"]) == (40 * MIB, 24 * MIB)
    assert "needed 40.0 MiB, free 24.0 MiB" in refusal["reason"]
    with pytest.raises(OutOfDeviceMemory):
        ledger.stage(plan, 10.0)
    assert region.parked


def test_unknown_tags_are_refused_by_name(device: Device) -> None:
    ledger = Ledger(device)
    ledger.create_region("weights", 2 * MIB)
    (refusal,) = ledger.preflight("sleep", "op", tags=["weigths"]).refusals
    assert (refusal["code"], refusal["tag"]) == ("unknown_tag", "weigths")
    assert "the tags here are: weights" in refusal["reason"]
    (refusal,) = ledger.preflight("sleep", "op", restore={"kv": "none"}).refusals
    assert (refusal["code"], refusal["tag"]) == ("unknown_tag", "kv")


def test_a_registered_user_of_the_memory_forbids_its_sleep_by_name_k10(device: Device) -> None:
    ledger = Ledger(device)
    ledger.create_region("kv_cache", 2 * MIB)
    registration = ledger.register_external("nixl transfer")
    ledger.register_external("usage counter", moves_kv=False)
    (refusal,) = ledger.preflight("sleep", "op").refusals
    assert refusal["code"] == "external_registration"
    assert "nixl transfer" in refusal["reason"]
    assert "usage counter" not in refusal["reason"]
    registration.close()
    registration.close()
    assert ledger.preflight("sleep", "op").refusals == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda ledger: ledger.preflight("nap", "op"), "choose sleep or wake"),
        (
            lambda ledger: ledger.preflight("sleep", "op", restore={"weights": "tape"}),
            "none, memset, cpu, pinned or disk",
        ),
        (lambda ledger: ledger.preflight("sleep", "op", overflow="spill"), "reject or evict"),
        (lambda ledger: ledger.create_region("", MIB), "needs a tag"),
        (lambda ledger: ledger.create_region("weights", 0), "size above 0"),
        (lambda ledger: ledger.create_region("weights", MIB), "already"),
        (lambda ledger: ledger.commit(), "nothing is staged"),
        (lambda ledger: Ledger(ledger.device, disk_path="/tmp"), "both disk_path and disk_bytes"),
        (lambda ledger: Ledger(ledger.device, disk_path="/nowhere", disk_bytes=MIB), "choose a folder"),
        (
            lambda ledger: Ledger(Device.host("y", MIB, 4096), host_pool=HostPool(ledger.device, 0)),
            "own device",
        ),
        (lambda ledger: Device.host("a/b", 64 * MIB), "cannot name a host device"),
        (lambda ledger: Device.host("x", 0), "capacity_bytes"),
        (lambda ledger: Device.host("x", 64 * MIB, 1000), "granularity_bytes"),
    ],
)
def test_a_mistake_is_named_with_what_to_do(
    device: Device, call: Callable[[Ledger], object], words: str
) -> None:
    ledger = Ledger(device)
    ledger.create_region("weights", 2 * MIB)
    with pytest.raises(Misuse, match=words):
        call(ledger)
    assert device.memory_info() == (62 * MIB, 64 * MIB)


def test_an_operation_under_way_forbids_another_and_new_regions(device: Device) -> None:
    ledger = Ledger(device)
    ledger.create_region("weights", 2 * MIB, restore="none")
    plan = ledger.preflight("sleep", "first")
    ledger.stage(plan, 10.0)
    (refusal,) = ledger.preflight("sleep", "second").refusals
    assert refusal["code"] == "conflict"
    assert "'first'" in refusal["reason"]
    with pytest.raises(Misuse, match="'first' is staged"):
        ledger.stage(plan, 10.0)
    with pytest.raises(Misuse, match="'first' is staged"):
        ledger.create_region("more", 2 * MIB)
    ledger.commit()
    with pytest.raises(Misuse, match="only goes forward"):
        ledger.abort()
    ledger.publish()
    ledger.abort()


def test_a_device_error_carries_call_and_code(make_device: Callable[..., Device]) -> None:
    faulty = FaultyDevice(make_device())
    faulty.fail_at(1, forever=True)
    with pytest.raises(DeviceError) as caught:
        Ledger(faulty).create_region("weights", 2 * MIB)
    error = caught.value
    assert (error.call, error.code, error.size_bytes, error.sticky) == ("reserve_range", 999, 2 * MIB, False)


def test_a_device_that_does_not_come_to_rest_is_busy_m5(make_device: Callable[..., Device]) -> None:
    faulty = FaultyDevice(make_device())
    ledger = Ledger(faulty)
    region = ledger.create_region("weights", 2 * MIB)
    faulty.delay("quiesce", 0.2)
    with pytest.raises(DeviceBusy):
        ledger.stage(ledger.preflight("sleep", "op"), 0.05)
    assert not region.parked
    faulty.delay("quiesce", 0)
    ledger.stage(ledger.preflight("sleep", "op"), 5.0)
    ledger.abort()


def test_a_stage_can_be_stopped_from_another_thread_while_status_answers(
    make_device: Callable[..., Device],
) -> None:
    faulty = FaultyDevice(make_device())
    ledger = Ledger(faulty)
    ledger.create_region("weights", 2 * MIB)
    faulty.fail_at(0)
    faulty.delay("copy", 1.0)
    caught: list[BaseException] = []

    def stage() -> None:
        try:
            ledger.stage(ledger.preflight("sleep", "op"), 10.0)
        except TorporError as error:
            caught.append(error)

    thread = threading.Thread(target=stage)
    thread.start()
    give_up = time.monotonic() + 20
    while "copy" not in faulty.log() and time.monotonic() < give_up:
        time.sleep(0.002)
    started = time.monotonic()
    assert ledger.status()["phase"] == "idle"
    assert ledger.memory()[0]["parked"] is False
    assert ledger.preflight("sleep", "other").refusals[0]["code"] == "conflict"
    ledger.stop()
    assert time.monotonic() - started < 0.7, "these must not wait for the stage"
    thread.join(timeout=10)
    assert [type(error) for error in caught] == [Stopped]
    assert ledger.parked_tags == []


@pytest.mark.skipif(cuda_device_count() > 0, reason="says what happens where there is no GPU")
def test_asking_for_a_gpu_where_there_is_none_is_a_device_error() -> None:
    with pytest.raises(DeviceError, match="driver"):
        Device.cuda(0)


def test_another_capacity_for_a_live_name_is_refused(device: Device) -> None:
    name = device.id.removeprefix("host:")
    with pytest.raises(Misuse, match=r"capacity of 64\.0 MiB, not 32\.0 MiB"):
        Device.host(name, 32 * MIB)
    assert Device.host(name, 64 * MIB).memory_info() == (64 * MIB, 64 * MIB)
