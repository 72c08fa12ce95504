"""What is measured: a region of a ledger, and beside it the bare calls and copies that nothing can be faster than."""

from __future__ import annotations

import mmap
import os
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from torpor.native import Device, Ledger

TAG = "weights"
STAGE_S = 120.0
PATTERN = 0x5A


class Subject(Protocol):
    """Awake when made."""

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class Torpor:
    """One region through the whole transaction. mode: none or pinned."""

    def __init__(self, device: Device, size_bytes: int, mode: str) -> None:
        self._mode = mode
        pool_bytes = 0 if mode == "none" else size_bytes
        self._ledger = Ledger(device, pool_bytes)
        self._region: Any = self._ledger.create_region(TAG, size_bytes)
        self._bytes = from_dlpack(self._region)
        self._bytes.fill_(PATTERN)

    def sleep(self) -> None:
        self._operation("sleep", {TAG: self._mode})

    def wake(self) -> None:
        self._operation("wake", None)

    def kept(self) -> bool:
        """Whether what it kept is what it was."""
        return bool((self._bytes == PATTERN).all())

    def close(self) -> None:
        del self._bytes, self._region, self._ledger

    def _operation(self, kind: str, restore: dict[str, str] | None) -> None:
        plan = self._ledger.preflight(kind, kind, restore=restore)
        if plan.refusals:
            raise RuntimeError(str(plan.refusals[0]["reason"]))
        self._ledger.stage(plan, STAGE_S)
        self._ledger.commit()
        self._ledger.publish()


class KernelMemory:
    """The limit on a host device: the kernel's calls that commit memory of a file, map it, and release it."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self.wake()

    def sleep(self) -> None:
        self._mapped.close()
        os.close(self._file)

    def wake(self) -> None:
        self._file = os.memfd_create("torpor-bench")
        os.posix_fallocate(self._file, 0, self._size_bytes)
        self._mapped = mmap.mmap(self._file, self._size_bytes)

    def close(self) -> None:
        self.sleep()


class HostCopy:
    """The limit of keeping contents on a host device: the same memory, and a copy to and from other memory."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._kept = torch.zeros(size_bytes, dtype=torch.uint8)
        self._take()

    def sleep(self) -> None:
        self._kept.copy_(self._bytes)
        del self._bytes
        self._mapped.close()

    def wake(self) -> None:
        self._take()
        self._bytes.copy_(self._kept)

    def close(self) -> None:
        del self._bytes, self._kept
        self._mapped.close()

    def _take(self) -> None:
        self._mapped = mmap.mmap(-1, self._size_bytes)
        self._bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)


class DriverMemory:
    """The limit on a GPU: the driver's allocation and release of as much. kept: with copies to pinned memory."""

    def __init__(self, size_bytes: int, kept: bool) -> None:
        self._size_bytes = size_bytes
        self._kept = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) if kept else None
        self._take()

    def sleep(self) -> None:
        if self._kept is not None:
            self._kept.copy_(self._bytes)
        del self._bytes
        torch.cuda.empty_cache()
        torch.cuda.synchronize()

    def wake(self) -> None:
        self._take()
        if self._kept is not None:
            self._bytes.copy_(self._kept)
        torch.cuda.synchronize()

    def close(self) -> None:
        del self._bytes, self._kept
        torch.cuda.empty_cache()

    def _take(self) -> None:
        self._bytes = torch.empty(self._size_bytes, dtype=torch.uint8, device="cuda")
