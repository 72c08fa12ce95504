"""P4 on the host device: what a preserving sleep moves and costs, by live pages and by the size of the pool.

    python tests/bench/p4_host.py --json FOLDER

preflight_s and stage_s should be flat over the pool's size for the same live pages, moved_bytes exactly the live
bytes, and stage_s linear in them. Small pages: the cost of a page shows, not that of memory bandwidth alone.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from record import Result

from torpor.native import Device, Ledger

MIB = 1 << 20
TOKENS_PER_BLOCK = 16
LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 32  # 16 KiB a page in float16
REPEATS = 7


def measure(result: Result, pool_mib: int, live_pages: int) -> None:
    device = Device.host(f"p4-{os.getpid()}-{pool_mib}-{live_pages}", pool_mib * MIB)
    ledger = Ledger(device, host_pool_bytes=512 * MIB)
    kv = ledger.create_kv_manager(
        LAYERS, KV_HEADS, HEAD_DIM, "float16", TOKENS_PER_BLOCK, gpu_bytes=pool_mib * MIB
    )
    tokens = list(range(live_pages * TOKENS_PER_BLOCK))
    sequence = kv.create_sequence("bench", tokens)
    assert sequence.resume()
    assert sequence.resize(len(tokens))
    sequence.commit(tokens)
    live_bytes = live_pages * kv.page_bytes
    case = f"pool {pool_mib} MiB, {live_pages} live"
    for repeat in range(REPEATS + 1):
        start = time.perf_counter()
        plan = ledger.preflight("sleep", "op", restore={"kv_cache": "pinned"})
        planned = time.perf_counter()
        assert not plan.refusals, plan.refusals
        report = ledger.stage(plan, 60.0)
        staged = time.perf_counter()
        ledger.commit()
        ledger.publish()
        assert device.memory_info()[0] == pool_mib * MIB
        ledger.stage(ledger.preflight("wake", "op"), 60.0)
        ledger.commit()
        ledger.publish()
        if repeat == 0:
            continue  # makes the host memory
        result.add("torpor", case, "preflight_s", "s", planned - start)
        result.add("torpor", case, "stage_s", "s", staged - planned)
        result.add("torpor", case, "moved_over_live", "1", report["moved_bytes"] / live_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    options = parser.parse_args()
    result = Result(
        "P4",
        notes="host device; 16 KiB pages; host memory from the pool, not made anew; a machine shared with other work",
    )
    for pool_mib in (64, 256, 1024):
        measure(result, pool_mib, 512)
    for live_pages in (64, 256, 1024, 4096):
        measure(result, 256, live_pages)
    print(result.table())
    options.json.mkdir(parents=True, exist_ok=True)
    print("kept in", result.save(options.json, "host"))


if __name__ == "__main__":
    main()
