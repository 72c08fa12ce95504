"""Asks the NVIDIA driver by cuda-python, whose word is not the native core's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torpor.service.doctor.facts import DriverFacts, Gpu


class _Refused(Exception):
    pass


def driver_facts() -> DriverFacts:
    files = sum(1 for path in Path("/dev").glob("nvidia[0-9]*"))
    try:
        from cuda.bindings import __version__, driver
    except ImportError as error:
        return DriverFacts(files, error=f"cuda-python: {error}")
    bindings = str(__version__)
    try:
        _ask(driver, driver.cuInit(0))
        version = int(_ask(driver, driver.cuDriverGetVersion()))
        gpus = tuple(_gpu(driver, ordinal) for ordinal in range(_ask(driver, driver.cuDeviceGetCount())))
    except Exception as error:  # each version of the bindings has its own for a driver that is not there
        return DriverFacts(files, bindings, error=(str(error) or repr(error)).splitlines()[0])
    return DriverFacts(files, bindings, (version // 1000, version % 1000 // 10), gpus)


def _gpu(driver: Any, ordinal: int) -> Gpu:
    device = _ask(driver, driver.cuDeviceGet(ordinal))
    names = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        key = getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_ask(driver, driver.cuDeviceGetAttribute(key, device)))

    name = _ask(driver, driver.cuDeviceGetName(64, device))
    return Gpu(
        name=name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        virtual_memory=bool(attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")),
        compute_mode=attribute("COMPUTE_MODE"),
    )


def _ask(driver: Any, answer: tuple[Any, ...]) -> Any:
    status, *found = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise _Refused(f"the driver answers {status!r}")
    return found[0] if found else None
