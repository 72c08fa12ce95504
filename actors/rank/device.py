"""Which device a rank works on, and the faults that tests ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torpor.actors.config import DeviceConfig, RankSpec
from torpor.native import Device, DeviceError, FaultyDevice, cuda_device_count

KINDS = ("auto", "host", "cuda")


class DeviceUnusable(Exception):
    """The configured device cannot be had; the text says what to do."""


def make_device(spec: RankSpec) -> Device:
    """The rank's device; on the host named "<device.name>-<index>", which is what makes ranks share one."""
    config = spec.device
    kind = device_kind(config)
    device = _host(config, spec.device_index) if kind == "host" else _cuda(spec.device_index)
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


def _host(config: DeviceConfig, index: int) -> Device:
    if not config.name:
        raise DeviceUnusable("host devices need a name that this cluster's ranks share; set device.name")
    return Device.host(f"{config.name}-{index}", config.host_capacity_bytes)


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
