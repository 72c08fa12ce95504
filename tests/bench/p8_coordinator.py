"""P8: what a coordinator costs by the number of ranks: CPU time and memory for each of them, journal included.

    python tests/bench/p8_coordinator.py --json FOLDER

One model over n in-process ranks that answer at once, on an ordinary event loop; the journal is a file. cpu_ms is
the process's time for one operation and rank (the ranks' own part is in it), kept_kib what the coordinator holds
for a rank after some operations. Both should be flat over n.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
import time
import tracemalloc
from pathlib import Path

from record import Result

from torpor.actors.config import ClusterConfig, ModelConfig
from torpor.actors.coordinator import Coordinator, Journal, MemoryCluster
from torpor.actors.messages import Kind, OperationRequest, OperationState

RANKS = (8, 16, 32, 64, 128, 256, 512)
CYCLES = 5  # a sleep and a wake each


class Bench:
    """A coordinator that has started on n ranks."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self.ranks = ranks
        self.config = ClusterConfig((ModelConfig("m", tensor_parallel=ranks),))
        self.cluster = MemoryCluster.build(self.config)
        self.path = folder / f"{ranks}.db"

    async def __aenter__(self) -> Bench:
        self.journal = await Journal.open(self.path)
        self.coordinator = Coordinator(self.config, self.journal, host_limit_bytes=1 << 40)
        await self.coordinator.attach("m", self.cluster.ranks["m"])
        await self.coordinator.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.coordinator.close()
        await self.journal.close()

    async def cycle(self) -> None:
        for kind in (Kind.SLEEP, Kind.WAKE):
            submitted = await self.coordinator.submit(OperationRequest(kind, "m"))
            outcome = await self.coordinator.wait(submitted.id, 60.0)
            assert outcome.state is OperationState.SUCCEEDED, outcome.reason


async def measure(result: Result, ranks: int, folder: Path) -> None:
    case = f"{ranks} ranks"
    async with Bench(ranks, folder) as bench:
        await bench.cycle()
        for _ in range(CYCLES):
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            await bench.cycle()
            operations = 2 * ranks
            result.add("coordinator", case, "cpu_ms", "ms", (time.process_time() - cpu_s) * 1e3 / operations)
            result.add(
                "coordinator", case, "wall_ms", "ms", (time.perf_counter() - wall_s) * 1e3 / operations
            )


async def weigh(result: Result, ranks: int, folder: Path) -> None:
    bench = Bench(ranks, folder)
    gc.collect()
    tracemalloc.start()
    async with bench:
        for _ in range(CYCLES):
            await bench.cycle()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    result.add("coordinator", f"{ranks} ranks", "kept_kib", "KiB", kept / 1024 / ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument("--most", type=int, default=max(RANKS), help="ranks")
    options = parser.parse_args()
    result = Result(
        "P8", notes="in-process ranks; a machine shared with other work: compare cpu_ms, not wall_ms"
    )
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (ranks for ranks in RANKS if ranks <= options.most):
            asyncio.run(measure(result, ranks, Path(folder)))
            Path(folder, f"{ranks}.db").unlink()
            asyncio.run(weigh(result, ranks, Path(folder)))
    print(result.table())
    options.json.mkdir(parents=True, exist_ok=True)
    print("kept in", result.save(options.json, "host"))


if __name__ == "__main__":
    main()
