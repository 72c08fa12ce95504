"""P7: what the protocol of a whole operation costs beyond memory work, with some ranks on one node, over real Ray.

    PYTHONPATH=tests python tests/bench/p7_protocol.py --json FOLDER [--device host|cuda] [--ranks 2]

A model of two ranks, or more, with 128 KiB each (on a GPU two granules), of which nothing is kept, sleeps and wakes;
beside each operation an actor that is no coordinator makes five bare round trips to as many actors that are no ranks, and
two bare writes into a journal that is none. operation_s is from the operation's begin to its end as the coordinator notes
them, memory work of next to nothing within it; asked_s is what its client waits, two more calls included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from p7_actors import Asker, Echo
from record import Result

from torpor.actors.cluster import Cluster, start_local
from torpor.actors.config import ClusterConfig, DeviceConfig, EngineConfig, HostPoolConfig, ModelConfig
from torpor.actors.messages import Kind, OperationRequest, OperationState

HERE = Path(__file__).parent
CYCLES, WARM_UP = 20, 3
START_S = 60.0
GOAL = 2.0


@contextmanager
def cluster_and_asker(folder: Path, device: str, ranks: int) -> Iterator[tuple[Cluster, Any]]:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), *sys.path]))
    cluster = start_local(
        ClusterConfig(
            models=(ModelConfig("toy", EngineConfig(kind="p7_actors:make_engine"), tensor_parallel=ranks),),
            device=DeviceConfig(device, ranks, 64 << 20),
            host_pool=HostPoolConfig(64 << 20),
            journal_path=str(folder / "journal.db"),
        )
    )
    try:
        asyncio.run(cluster.wait_until_loaded(START_S))
        echoes = [ray.remote(num_cpus=0)(Echo).remote() for _ in range(ranks)]
        yield cluster, ray.remote(num_cpus=0)(Asker).remote(echoes, str(folder / "bare.db"))
    finally:
        cluster.shutdown()


async def operate(result: Result | None, cluster: Cluster, kind: Kind) -> None:
    began_s = time.perf_counter()
    submitted = await cluster.control.submit(OperationRequest(kind, "toy"))
    operation = await cluster.control.wait(submitted.id, 60.0)
    asked_s = time.perf_counter() - began_s
    assert operation.state is OperationState.SUCCEEDED, operation.reason
    assert operation.finished_at is not None
    if result is not None:
        result.add("torpor", str(kind), "operation_s", "s", operation.finished_at - operation.created_at)
        result.add("torpor", str(kind), "asked_s", "s", asked_s)
        for phase in operation.phases:
            result.add("torpor", str(kind), f"{phase.name}_s", "s", phase.seconds)


async def measure(result: Result, cluster: Cluster, asker: Any, cycles: int) -> None:
    for at in range(-WARM_UP, cycles):
        for kind in (Kind.SLEEP, Kind.WAKE):
            await operate(result if at >= 0 else None, cluster, kind)
            trips_s, writes_s = await asker.round_trips_s.remote(), await asker.writes_s.remote()
            if at >= 0:
                result.add("limit", str(kind), "round_trips_s", "s", trips_s)
                result.add("limit", str(kind), "writes_s", "s", writes_s)
                result.add("limit", str(kind), "sum_s", "s", trips_s + writes_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument("--cycles", type=int, default=CYCLES)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    notes = (
        f"{options.ranks} ranks; subjects took turns; a machine shared with other work: compare within a run"
    )
    result, name = Result("P7", notes=notes), "host"
    if options.device == "cuda":
        from cycles import gpu_name

        name = gpu_name()
    if options.ranks != 2:
        name += f"-{options.ranks}-ranks"
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster_and_asker(Path(folder), options.device, options.ranks) as (cluster, asker),
    ):
        asyncio.run(measure(result, cluster, asker, options.cycles))
    print(result.table())
    medians = {(row["case"], row["metric"]): row["median"] for row in result.rows()}
    for kind in (Kind.SLEEP, Kind.WAKE):
        ratio = medians[str(kind), "operation_s"] / medians[str(kind), "sum_s"]
        print(f"{kind}: {ratio:.2f} of the bare calls and writes (goal: {GOAL:g})")
    options.json.mkdir(parents=True, exist_ok=True)
    print("kept in", result.save(options.json, name))


if __name__ == "__main__":
    main()
