"""Which device a rank works on, and the faults that tests ask of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from torpor.actors.config import DeviceConfig, RankSpec
from torpor.native import Device, DeviceError, FaultyDevice, cuda_device_count

KINDS = ("auto", "host", "cuda")


class DeviceUnusable(Exception):
    """The configured device cannot be had; the text says what to do."""


def make_device(spec: RankSpec) -> Device:
    """The rank's device, the assigned one if one is; a host device's name is what makes ranks share it."""
    config = spec.device
    if device_kind(config) == "host":
        device = _host(config, spec.device_index, spec.device_id)
    else:
        device = _assigned(spec.device_id) if spec.device_id else _cuda(spec.device_index)
    return FaultyDevice(device) if spec.rank in config.faults else device


def device_kind(config: DeviceConfig) -> str:
    """ "host" or "cuda": what `auto` comes to on this machine."""
    if config.kind not in KINDS:
        raise DeviceUnusable(f"device.kind is {config.kind!r}; choose one of {', '.join(KINDS)}")
    if config.kind == "auto":
        return "cuda" if cuda_device_count() > 0 else "host"
    return config.kind


def arm_faults(device: Device, config: DeviceConfig, rank: int) -> None:
    """Begin to fail and delay calls as configured. After loading, so that k counts calls of operations."""
    fault = cast("Mapping[str, Any]", config.faults.get(rank, {}))
    if not isinstance(device, FaultyDevice):
        return
    device.fail_at(int(fault.get("fail_at", 0)), bool(fault.get("forever", False)))
    for call, seconds in fault.get("delay", {}).items():
        device.delay(str(call), float(seconds))


def _host(config: DeviceConfig, index: int, device_id: str) -> Device:
    if not config.name:
        raise DeviceUnusable("host devices need a name that this cluster's ranks share; set device.name")
    name = device_id.removeprefix("host:") or f"{config.name}-{index}"
    return Device.host(name, config.host_capacity_bytes)


def _assigned(uuid: str) -> Device:
    # Ray shows this process what it has set aside, which is another GPU when models share some. The count makes the
    # driver read the variable, once and for all: nothing may come in between.
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    cuda_device_count()
    device = _cuda(0)
    if device.id != uuid:
        raise DeviceUnusable(
            f"GPU {uuid} was assigned to this rank, and the driver shows {device.id}: something has used CUDA in "
            "this process before; let engines touch it in `load` only"
        )
    return device


def _cuda(ordinal: int) -> Device:
    count = cuda_device_count()
    if ordinal >= count:
        found = f"this machine shows {count} CUDA device(s)" if count else "no usable CUDA device was found"
        raise DeviceUnusable(
            f"device.kind cuda needs GPU {ordinal}, but {found}; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, "
            "or set device.kind to host to play the GPU in RAM"
        )
    try:
        return Device.cuda(ordinal)
    except DeviceError as error:
        raise DeviceUnusable(
            f"GPU {ordinal} cannot be used: {error}; check the driver, or set device.kind to host"
        ) from error
