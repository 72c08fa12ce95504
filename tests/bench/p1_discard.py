"""P1: discard a large region, sleep and wake, beside the driver's own calls in the same run.

    python tests/bench/p1_discard.py --json FOLDER [--gib 64]

"limit" maps and unmaps the same bytes by bare driver calls with 1 GiB chunks; "torpor" goes through the ledger's
whole transaction. Each with a pause of 1 s asleep and back to back (the driver scrubs freed memory in the background,
and a create right after a release waits for it).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rivals
import torch
from cuda.bindings import driver
from cycles import gpu_name, operation
from record import Result

from torpor.native import Device, Ledger
from torpor.native.adopt import adopt

GIB = 1 << 30
REPEATS = 7
MODEL_TENSORS = 291
DROPPED = {"weights": "none"}


def call(result: tuple[Any, ...]) -> Any:
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
    return result[1] if len(result) == 2 else None


class BareDriver:
    """What any program must at least do: 1 GiB chunks, one set-access call over all of them."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.property = driver.CUmemAllocationProp()
        self.property.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.property.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.access = driver.CUmemAccessDesc()
        self.access.location = self.property.location
        self.access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.base = int(call(driver.cuMemAddressReserve(size_bytes, 0, 0, 0)))
        self.handles: list[Any] = []

    def wake(self) -> None:
        for offset in range(0, self.size_bytes, GIB):
            handle = call(driver.cuMemCreate(GIB, self.property, 0))
            call(driver.cuMemMap(self.base + offset, GIB, 0, handle, 0))
            self.handles.append(handle)
        call(driver.cuMemSetAccess(self.base, self.size_bytes, [self.access], 1))

    def sleep(self) -> None:
        call(driver.cuMemUnmap(self.base, self.size_bytes))
        while self.handles:
            call(driver.cuMemRelease(self.handles.pop()))

    def close(self) -> None:
        call(driver.cuMemAddressFree(self.base, self.size_bytes))


def timed(result: Result, subject: str, case: str, metric: str, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    result.add(subject, case, metric, "s", seconds)
    return seconds


def measure(
    result: Result,
    subject: str,
    sleep: Callable[[], object],
    wake: Callable[[], object],
    pause_s: float,
    detail: str = "",
) -> None:
    case = (f"pause {pause_s:g} s" if pause_s else "back to back") + (f", {detail}" if detail else "")
    for _ in range(REPEATS):
        time.sleep(pause_s)
        pair = timed(result, subject, case, "sleep_s", sleep)
        time.sleep(pause_s)
        pair += timed(result, subject, case, "wake_s", wake)
        result.add(subject, case, "pair_s", "s", pair)


def adopted_model(result: Result, size_bytes: int, pause_s: float) -> None:
    """As many tensors as a dense model of 8 B parameters has, moved into the ledger's regions."""
    ledger = Ledger(Device.cuda(0))
    module = torch.nn.Module()
    for number in range(MODEL_TENSORS):
        tensor = torch.empty(size_bytes // MODEL_TENSORS // 2, dtype=torch.bfloat16, device="cuda")
        module.register_parameter(f"p{number}", torch.nn.Parameter(tensor, requires_grad=False))
    del tensor
    adopt(ledger, module)
    torch.cuda.empty_cache()
    case = f"{MODEL_TENSORS} tensors"
    measure(
        result,
        "torpor",
        lambda: operation(ledger, "sleep", DROPPED),
        lambda: operation(ledger, "wake", DROPPED),
        pause_s,
        case,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument("--gib", type=int, default=64)
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    result = Result("P1", notes=f"{options.gib} GiB, mode none; 1 GiB chunks for the limit")
    for pause_s in (1.0, 0.0):
        bare = BareDriver(options.gib * GIB)
        bare.wake()
        measure(result, "limit", bare.sleep, bare.wake, pause_s)
        bare.sleep()
        bare.close()
        time.sleep(1.0)
        ledger = Ledger(Device.cuda(0))
        region = ledger.create_region("weights", options.gib * GIB)
        measure(
            result,
            "torpor",
            lambda ledger=ledger: operation(ledger, "sleep", DROPPED),  # type: ignore[misc]
            lambda ledger=ledger: operation(ledger, "wake", DROPPED),  # type: ignore[misc]
            pause_s,
        )
        del region, ledger
        time.sleep(1.0)
    for pause_s in (1.0, 0.0):
        for tensors in (1, MODEL_TENSORS):
            case = f"{'pause 1 s' if pause_s else 'back to back'}, {tensors} tensors"
            rivals.measure(
                result, "memory_saver", rivals.Load(options.gib * GIB, tensors, "none", pause_s), case
            )
        adopted_model(result, options.gib * GIB, pause_s)
    print(result.table())
    print(
        "kept in",
        result.save(options.json, gpu_name()),
    )


if __name__ == "__main__":
    main()
