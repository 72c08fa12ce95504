"""One subject of a benchmark in a process of its own, told by lines on stdin what to do next.

    python tests/bench/subjects.py SUBJECT LOAD

A line in is {"do": COMMAND, …}, a line out what came of it: {"error"} or the answer. Commands: `load` makes the memory;
`sleep`, `wake` → {"seconds"}; `pairs` {"count"} → {"pairs"}: seconds of each, back to back; `change`; `right` →
{"right"}; `renew` → {"seconds"}: torpor alone, all anew with backups made in advance; `end`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from cycles import Link, operation
from load import GIB, Load
from rivals import Checkpoint, CpuCopy, MemorySaver

from torpor.native import Device, Ledger, Region


class BareDriver:
    """What any program must at least do: 1 GiB chunks, one set-access call over all of them."""

    def __init__(self, load: Load) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self.size_bytes = load.size_bytes
        self.property = driver.CUmemAllocationProp()
        self.property.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.property.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.access = driver.CUmemAccessDesc()
        self.access.location = self.property.location
        self.access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        torch.zeros(1, device="cuda")
        self.base = int(self._call(driver.cuMemAddressReserve(self.size_bytes, 0, 0, 0)))
        self.handles: list[Any] = []
        self.wake()

    def wake(self) -> None:
        driver = self.driver
        for offset in range(0, self.size_bytes, GIB):
            size_bytes = min(GIB, self.size_bytes - offset)
            handle = self._call(driver.cuMemCreate(size_bytes, self.property, 0))
            self._call(driver.cuMemMap(self.base + offset, size_bytes, 0, handle, 0))
            self.handles.append(handle)
        self._call(driver.cuMemSetAccess(self.base, self.size_bytes, [self.access], 1))

    def sleep(self) -> None:
        self._call(self.driver.cuMemUnmap(self.base, self.size_bytes))
        while self.handles:
            self._call(self.driver.cuMemRelease(self.handles.pop()))

    def change(self) -> None:
        """Nothing is written."""

    def right(self) -> bool:
        return True

    def close(self) -> None:
        if self.handles:
            self.sleep()

    def _call(self, result: tuple[Any, ...]) -> Any:
        if result[0] != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"driver: {result[0]!r}")
        return result[1] if len(result) == 2 else None


class Torpor:
    """The ledger's whole transaction, preflight to publish, over one region, or over a module that was adopted."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.restore = {"weights": load.keep}
        name = load.host_device
        self.device = Device.host(name, 4 * load.size_bytes) if name else Device.cuda(0)
        self.where = "cpu" if name else "cuda"
        self.seed = 0
        self._make()

    def _make(self) -> None:
        bound_bytes = 0 if self.load.keep == "none" else 2 * self.load.size_bytes
        self.ledger = Ledger(self.device, host_pool_bytes=bound_bytes)
        self.region: Region | None = None
        self.module = torch.nn.Module()
        if self.load.tensors == 1:
            self.region = self.ledger.create_region(
                "weights", self.load.size_bytes, name="all", immutable=True
            )
            self.change()
            return
        for number, size_bytes in enumerate(self.load.sizes()):
            tensor = torch.empty(size_bytes // 2, dtype=torch.bfloat16, device=self.where)
            self.module.register_parameter(f"p{number}", torch.nn.Parameter(tensor, requires_grad=False))
        del tensor
        self.ledger.adopt(self.module)
        if self.where == "cuda":
            torch.cuda.empty_cache()

    def _lanes(self) -> torch.Tensor:
        assert self.region is not None, "contents are looked at in one region only"
        return torch.from_dlpack(self.region).view(torch.int64)

    def change(self) -> None:
        self.seed += 1
        generator = torch.Generator(self.where).manual_seed(self.seed)
        lanes = self._lanes()
        lanes.random_(0, 1 << 40, generator=generator)
        self.sum = int(lanes.sum())
        assert self.region is not None
        self.region.contents_changed()

    def right(self) -> bool:
        return int(self._lanes().sum()) == self.sum

    def sleep(self) -> None:
        operation(self.ledger, "sleep", self.restore)

    def wake(self) -> None:
        operation(self.ledger, "wake", self.restore)

    def renew(self) -> float:
        """A new ledger, whose backups are made in advance: the seconds of that."""
        self.ledger.trim_host()
        self.close()
        self._make()
        start = time.perf_counter()
        assert self.ledger.prefill_backups(120.0) == self.load.size_bytes
        return time.perf_counter() - start

    def close(self) -> None:
        del self.region, self.module, self.ledger


class LinkCopies:
    """What nothing can be faster than: one copy each way, of memory that is there already."""

    def __init__(self, load: Load) -> None:
        self.link = Link(load.size_bytes)

    def sleep(self) -> None:
        self.link.out()

    def wake(self) -> None:
        self.link.back()

    def right(self) -> bool:
        return True

    def close(self) -> None:
        del self.link


MAKERS: dict[str, Callable[[Load], Any]] = {
    "limit": BareDriver,
    "link": LinkCopies,
    "torpor": Torpor,
    "saver": lambda load: MemorySaver(load, "preload", retain=False),
    "saver_torch": lambda load: MemorySaver(load, "torch", retain=False),
    "saver_retain": lambda load: MemorySaver(load, "preload", retain=True),
    "cpu_copy": CpuCopy,
    "checkpoint": Checkpoint,
}


class Played:
    """A subject, and the commands over it."""

    def __init__(self, maker: Callable[[Load], Any], load: Load) -> None:
        self.maker, self.load, self.subject = maker, load, None
        self.synchronize = (lambda: None) if load.host_device else torch.cuda.synchronize

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        what = command["do"]
        if what == "load":
            self.subject = self.maker(self.load)
            self.synchronize()
            return {}
        subject: Any = self.subject
        if what in ("sleep", "wake"):
            return {"seconds": self.timed(getattr(subject, what))}
        if what == "pairs":
            count = command["count"]
            return {"pairs": [(self.timed(subject.sleep), self.timed(subject.wake)) for _ in range(count)]}
        if what == "right":
            return {"right": subject.right()}
        if what == "renew":
            return {"seconds": subject.renew()}
        {"change": subject.change, "end": subject.close}[what]()
        return {}

    def timed(self, work: Callable[[], object]) -> float:
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start


def main() -> None:
    played = Played(MAKERS[sys.argv[1]], Load.parsed(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = played.do(command)
        except Exception as error:
            answer = {"error": f"{command['do']}: {error!r}"}
        print(json.dumps(answer), file=answers, flush=True)
        if command["do"] == "end":
            break


if __name__ == "__main__":
    main()
