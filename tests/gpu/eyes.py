"""The driver's word on memory and the kernel's on this process: never our own books."""

from __future__ import annotations

import ctypes
from pathlib import Path


def driver_free_bytes() -> int:
    """Of the current context's GPU, by cuda-python; by the driver's library itself where that is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        status = ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        assert status == 0, f"cuMemGetInfo: {status}"
        return free.value
    error, found, _ = driver.cuMemGetInfo()
    assert error == driver.CUresult.CUDA_SUCCESS
    return int(found)


def process_bytes(field: str) -> int:
    """VmRSS or VmSize, as /proc says."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())
