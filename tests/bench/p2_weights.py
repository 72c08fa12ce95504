"""P2 and P3: preserve weights in page-locked host memory, beside the link's own speed in the same run.

    python tests/bench/p2_weights.py --json FOLDER [--gib 16]

"limit" is one copy of the same bytes from and to page-locked memory that is already there. Torpor's rows are the whole
transaction, preflight to publish: the first sleep of a process (which must make the host memory), later ones with
changed contents (the host memory is there), later ones unchanged (M9: only unmapped), and the first with a backup
that was made in advance.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import rivals
import torch
from cycles import gpu_name, link_seconds, operation
from record import Result

from torpor.native import Device, Ledger, Region

GIB = 1 << 30
REPEATS = 5
KEPT = {"weights": "pinned"}


def pair(result: Result, ledger: Ledger, region: Region, case: str, expected: int) -> None:
    free_bytes = torch.cuda.mem_get_info()[0]
    result.add("torpor", case, "sleep_s", "s", operation(ledger, "sleep", KEPT).whole_s)
    assert torch.cuda.mem_get_info()[0] >= free_bytes + region.size_bytes - (64 << 20)
    time.sleep(0.5)
    result.add("torpor", case, "wake_s", "s", operation(ledger, "wake", KEPT).whole_s)
    found = int(torch.from_dlpack(region).view(torch.int64).sum())
    assert found == expected, "the contents that came back are not those that went"
    time.sleep(0.5)


def fill(region: Region, seed: int) -> int:
    lanes = torch.from_dlpack(region).view(torch.int64)
    lanes.random_(0, 1 << 40, generator=torch.Generator("cuda").manual_seed(seed))
    return int(lanes.sum())


def limit(result: Result, size_bytes: int) -> None:
    for metric, samples in zip(("sleep_s", "wake_s"), link_seconds(size_bytes, REPEATS), strict=True):
        for seconds in samples:
            result.add("limit", "one copy, host memory there", metric, "s", seconds)


def fresh(size_bytes: int) -> tuple[Ledger, Region, int]:
    ledger = Ledger(Device.cuda(0), host_pool_bytes=2 * size_bytes)
    region = ledger.create_region("weights", size_bytes, name="all", immutable=True)
    return ledger, region, fill(region, 1)


def cycles(result: Result, size_bytes: int) -> None:
    for _ in range(REPEATS):
        ledger, region, expected = fresh(size_bytes)
        pair(result, ledger, region, "first cycle", expected)
        pair(result, ledger, region, "unchanged since", expected)
        ledger.trim_host()
        del ledger, region
    ledger, region, expected = fresh(size_bytes)
    for seed in range(REPEATS):
        pair(result, ledger, region, "changed, host memory there" if seed else "warm-up", expected)
        region.contents_changed()
        expected = fill(region, seed + 2)
    pair(result, ledger, region, "changed, host memory there", expected)
    del ledger, region
    for _ in range(REPEATS):
        ledger, region, expected = fresh(size_bytes)
        start = time.perf_counter()
        assert ledger.prefill_backups(120.0) == size_bytes
        result.add("torpor", "first, backup made before", "backup_s", "s", time.perf_counter() - start)
        pair(result, ledger, region, "first, backup made before", expected)
        del ledger, region


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument("--gib", type=int, default=16)
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    result = Result(
        "P2", notes=f"{options.gib} GiB of weights, mode pinned; P3 is 'unchanged since' and 'backup'"
    )
    limit(result, options.gib * GIB)
    torch.cuda.empty_cache()
    cycles(result, options.gib * GIB)
    for subject in ("memory_saver", "memory_saver_retain", "cpu_copy", "checkpoint"):
        rivals.measure(result, subject, rivals.Load(options.gib * GIB), "1 tensor")
    print(result.table())
    print("kept in", result.save(options.json, gpu_name()))


if __name__ == "__main__":
    main()
