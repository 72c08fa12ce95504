"""P8: what a coordinator costs by the number of ranks: CPU time and memory for each of them, journal included.

    python tests/bench/p8_coordinator.py --json FOLDER

One model over n in-process ranks that answer at once, on an ordinary event loop; the journal is a file. By n:

- cpu_ms: the process's time for one operation and rank, everything in it (also the operation's fixed cost, over n);
- added_ms: what each rank adds to an operation of one rank, which has the fixed cost in it: this is to be flat;
- ranks_ms: the in-process ranks' own part of both, as they take when nobody but a loop calls them;
- kept_kib and added_kib: what the coordinator holds for a rank after some operations, in the same two ways.

The medians are of one run; on a machine with other work the least of the samples says more.
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
from torpor.actors.coordinator import Coordinator, Journal, MemoryCluster, MemoryRank
from torpor.actors.messages import Kind, OperationRequest, OperationState, Phase, PhaseCall

RANKS = (8, 16, 32, 64, 128, 256, 512)
SAMPLES = 7
ROUNDS = 512  # ranks times cycles, of a sleep and a wake each, in one sample at least


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


def rounds(ranks: int) -> int:
    """Cycles in one sample: enough work that the clock and the neighbours matter little."""
    return max(2, ROUNDS // ranks)


async def measure(ranks: int, folder: Path) -> tuple[list[float], list[float]]:
    """(CPU, wall) milliseconds for one operation over all ranks, by sample."""
    cpu_ms, wall_ms = [], []
    async with Bench(ranks, folder) as bench:
        await bench.cycle()
        for _ in range(SAMPLES):
            gc.collect()
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            for _ in range(rounds(ranks)):
                await bench.cycle()
            operations = 2 * rounds(ranks)
            cpu_ms.append((time.process_time() - cpu_s) * 1e3 / operations)
            wall_ms.append((time.perf_counter() - wall_s) * 1e3 / operations)
    return cpu_ms, wall_ms


async def measure_ranks(ranks: int) -> list[float]:
    """CPU milliseconds of the ranks themselves for the calls of one operation."""
    cluster = MemoryCluster.build(ClusterConfig((ModelConfig("m", tensor_parallel=ranks),)))
    each, samples = cluster.ranks["m"], []
    for sample in range(SAMPLES):
        cpu_s = time.process_time()
        for turn in range(rounds(ranks)):
            for kind in (Kind.SLEEP, Kind.WAKE):
                await operate(each, OperationRequest(kind, "m"), f"{kind}-{sample}-{turn}")
        samples.append((time.process_time() - cpu_s) * 1e3 / (2 * rounds(ranks)))
    return samples


async def operate(ranks: list[MemoryRank], request: OperationRequest, name: str) -> None:
    """The calls that a coordinator makes."""
    for rank in ranks:
        await rank.status()
    for rank in ranks:
        assert (await rank.preflight(PhaseCall(name, Phase.PREFLIGHT, 1), request)).ok
    if request.kind is Kind.SLEEP:
        await ranks[0].drain(PhaseCall(name, Phase.DRAIN, 1), request.drain, 1.0, 60.0)
    for rank in ranks:
        assert (await rank.stage(PhaseCall(name, Phase.STAGE, 1), 1.0)).ok
    for rank in ranks:
        assert (await rank.commit(PhaseCall(name, Phase.COMMIT, 1))).ok
    for rank in ranks:
        assert (await rank.publish(PhaseCall(name, Phase.PUBLISH, 1))).ok
    for rank in ranks:
        await rank.status()


async def weigh(ranks: int, folder: Path) -> float:
    """KiB that are kept."""
    bench = Bench(ranks, folder)
    gc.collect()
    tracemalloc.start()
    async with bench:
        for _ in range(SAMPLES):
            await bench.cycle()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept / 1024


def compare(result: Result, ranks: int, folder: Path, one: tuple[float, float]) -> tuple[float, float]:
    """(CPU ms, KiB) of n ranks; one: of a single one, without the fixed cost of which the rest is told."""
    case = f"{ranks} ranks"
    cpu_ms, wall_ms = asyncio.run(measure(ranks, folder))
    Path(folder, f"{ranks}.db").unlink()
    kept_kib = asyncio.run(weigh(ranks, folder))
    for cpu, wall, own in zip(cpu_ms, wall_ms, asyncio.run(measure_ranks(ranks)), strict=True):
        result.add("coordinator", case, "cpu_ms", "ms", cpu / ranks)
        if ranks > 1:
            result.add("coordinator", case, "added_ms", "ms", (cpu - one[0]) / (ranks - 1))
        result.add("coordinator", case, "ranks_ms", "ms", own / ranks)
        result.add("coordinator", case, "wall_ms", "ms", wall / ranks)
    result.add("coordinator", case, "kept_kib", "KiB", kept_kib / ranks)
    if ranks > 1:
        result.add("coordinator", case, "added_kib", "KiB", (kept_kib - one[1]) / (ranks - 1))
    return min(cpu_ms), kept_kib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument("--most", type=int, default=max(RANKS), help="ranks")
    options = parser.parse_args()
    result = Result(
        "P8", notes="in-process ranks; a machine shared with other work: compare added_ms, not wall_ms"
    )
    with tempfile.TemporaryDirectory() as folder:
        one = compare(result, 1, Path(folder), (0.0, 0.0))
        for ranks in (ranks for ranks in RANKS if ranks <= options.most):
            compare(result, ranks, Path(folder), one)
    print(result.table())
    options.json.mkdir(parents=True, exist_ok=True)
    print("kept in", result.save(options.json, "host"))


if __name__ == "__main__":
    main()
