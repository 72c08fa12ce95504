"""P4 and P5: pages of every size saved and brought back, beside the link's own speed in the same run.

    python tests/bench/p5_pages.py --json FOLDER [--gib 8]

Each row is a preserving sleep's or a wake's stage over that many live pages: the bytes moved over the seconds that
the stage took. "limit" copies as many bytes in one piece. The pages lie in slots that are scattered by a seed, before
the sleep and after the wake, as they never do but in tests; "interleaved" ones lie as 64 texts that grew side by side
leave them, of which every second one is gone: none has a neighbour, and a wake puts them in order. Of each stage's
seconds the rows say what this thread spent on books (planning_s), on mapping, and on copies; of the latter it waited
waiting_s, the rest went into their preparation and launches; of books and mapping ahead_s came before the first copy,
beside the rest earlier pages were under way. Each sleep lasts half a second: the driver scrubs freed memory in the
background, and a wake at once would wait for that (P1 shows how long).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from cycles import PARTS, gpu_name, link_seconds, operation
from record import Result

from torpor.native import Device, KvManager, Ledger, Sequence

KIB, GIB = 1 << 10, 1 << 30
PAGES_KIB = (16, 32, 64, 128, 256, 512, 2048)
REPEATS = 5
ASLEEP_S = 0.5
PAGES_A_SEQUENCE = 1 << 15
INTERLEAVED = 64
INTERLEAVED_KIB = (16, 64, 128)
TOKENS_PER_BLOCK = 16
KEPT = {"kv_cache": "pinned"}


def limit(result: Result, size_bytes: int) -> None:
    for metric, samples in zip(("d2h_gb_s", "h2d_gb_s"), link_seconds(size_bytes, REPEATS), strict=True):
        for seconds in samples:
            result.add("limit", "one piece", metric, "GB/s", size_bytes / seconds / 1e9)


def live(kv: KvManager, number: int, count: int) -> Sequence:
    """The number-th sequence of as many as hold `count` pages in all."""
    blocks = min(PAGES_A_SEQUENCE, count - number * PAGES_A_SEQUENCE)
    sequence = kv.create_sequence(f"bench {number}", [])
    assert sequence.resume()
    assert sequence.resize(blocks * TOKENS_PER_BLOCK)
    return sequence


def interleaved(kv: KvManager, count: int) -> list[Sequence]:
    """As many as hold `count` pages in all, every second one of those that have grown together."""
    sequences = [kv.create_sequence(f"bench {number}", []) for number in range(INTERLEAVED)]
    assert all(sequence.resume() for sequence in sequences)
    for blocks in range(1, 2 * count // INTERLEAVED + 1):
        for sequence in sequences:
            assert sequence.resize(blocks * TOKENS_PER_BLOCK)
    for gone in sequences[1::2]:
        gone.close()
    return sequences[::2]


def contents(pages: torch.Tensor, sequence: Sequence) -> float:
    slots = torch.from_numpy(sequence.page_table[sequence.page_table >= 0].astype("int64")).cuda()
    return float(pages[slots].double().sum().item())


def measure(
    result: Result, case: str, page_bytes: int, live_bytes: int, pool_bytes: int, scattered: bool = True
) -> None:
    head_dim = page_bytes // (TOKENS_PER_BLOCK * 2 * 2)  # one layer, one head, keys and values of two bytes
    ledger = Ledger(Device.cuda(0), host_pool_bytes=2 * live_bytes)
    seed = 7 if scattered else None
    kv = ledger.create_kv_manager(
        1, 1, head_dim, "float16", TOKENS_PER_BLOCK, gpu_bytes=pool_bytes, seed=seed
    )
    assert kv.page_bytes == page_bytes
    count = live_bytes // page_bytes
    if scattered:
        sequences = [live(kv, number, count) for number in range(-(-count // PAGES_A_SEQUENCE))]
    else:
        sequences = interleaved(kv, count)
    pages = torch.from_dlpack(kv.page_view(0, "k"))
    pages.normal_(generator=torch.Generator("cuda").manual_seed(7))
    before = [contents(pages, sequence) for sequence in sequences]
    for repeat in range(REPEATS + 1):
        rows = {"sleep": operation(ledger, "sleep", KEPT)}
        time.sleep(ASLEEP_S)
        rows["wake"] = operation(ledger, "wake", KEPT)
        if repeat == 0:
            continue  # makes the host memory
        for (kind, row), speed in zip(rows.items(), ("d2h_gb_s", "h2d_gb_s"), strict=True):
            assert row.moved_bytes == count * page_bytes
            result.add("torpor", case, speed, "GB/s", row.moved_bytes / row.stage_s / 1e9)
            result.add("torpor", case, f"{kind}_s", "s", row.whole_s)
            for part in ("stage_s", *PARTS):
                result.add("torpor", case, f"{kind}_{part}", "s", getattr(row, part))
    for sequence, was in zip(sequences, before, strict=True):
        assert sequence.resume()
        assert contents(pages, sequence) == was


def breakdown(result: Result, case: str, kind: str, pages: int) -> str:
    """Where a stage's time went, of its medians: in ms, and in ns a page."""

    def median_ms(part: str) -> float:
        return 1e3 * result.median("torpor", case, f"{kind}_{part}")

    parts = {part: median_ms(part) for part in ("stage_s", *PARTS)}
    rows = {
        "stage": parts["stage_s"],
        "before the first copy": parts["ahead_s"],
        "books and mapping beside copies": parts["planning_s"] + parts["mapping_s"] - parts["ahead_s"],
        "launches": parts["copying_s"] - parts["waiting_s"],
        "waiting": parts["waiting_s"],
        "none of these": parts["stage_s"] - parts["planning_s"] - parts["mapping_s"] - parts["copying_s"],
        "mapping in all": parts["mapping_s"],
    }
    words = (f"{name} {ms:.2f} ms ({1e6 * ms / pages:.0f} ns a page)" for name, ms in rows.items())
    return f"{case}, {kind}: " + "; ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument("--gib", type=int, default=8)
    parser.add_argument(
        "--pages-kib", type=int, nargs="+", default=PAGES_KIB, help="sizes; with some, no row of P4"
    )
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    result = Result("P5", notes=f"{options.gib} GiB of live pages; kernels: {Device.cuda(0).kernels}")
    limit(result, options.gib * GIB)
    torch.cuda.empty_cache()
    live_bytes = options.gib * GIB
    for page_kib in options.pages_kib:
        case = f"{page_kib} KiB"
        measure(result, case, page_kib * KIB, live_bytes, live_bytes + GIB)
        for kind in ("sleep", "wake"):
            print(breakdown(result, case, kind, live_bytes // (page_kib * KIB)), flush=True)
    for page_kib in sorted(set(options.pages_kib) & set(INTERLEAVED_KIB)):
        case = f"{page_kib} KiB, interleaved"
        measure(result, case, page_kib * KIB, live_bytes, 2 * live_bytes + GIB, scattered=False)
    if tuple(options.pages_kib) == PAGES_KIB:
        measure(result, "P4: 2 MiB, 6.4 of 64 GiB", 2 << 20, int(6.4 * 512) * (2 << 20), 64 * GIB)
    print(result.table())
    print("kept in", result.save(options.json, gpu_name()))


if __name__ == "__main__":
    main()
