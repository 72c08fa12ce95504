"""A real local Ray, and the default engine over the rig's ranks in it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from multi.rig import Rig

from torpor.actors.config import (
    GIB,
    MIB,
    ClusterConfig,
    Deadlines,
    DeviceConfig,
    EngineConfig,
    HostPoolConfig,
    KvCacheConfig,
    ModelConfig,
)

MakeServed = Callable[..., object]
HOST_CAPACITY_BYTES = 128 * MIB


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from torpor.actors.cluster import start_local

    kind = Rig.of_environment().kind
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        journal = tmp_path_factory.mktemp("journal") / "journal.db"
        cluster = start_local(ClusterConfig((), DeviceConfig(kind=kind), journal_path=str(journal)))
        yield
        cluster.shutdown()


def cache_of(rig: Rig) -> KvCacheConfig:
    size_bytes = GIB if rig.on_gpus else 4 * MIB
    return KvCacheConfig(tokens_per_block=8, gpu_bytes=size_bytes, host_bytes=64 * MIB)


@pytest.fixture
def make_served(local_ray: None, tmp_path: Path) -> Iterator[MakeServed]:
    """Of faults by rank; each a Torpor in a namespace of its own, with one model, "toy", of the rig's ranks."""
    from multi.rig import SHAPE
    from ranks.torpors import Torpor, starting
    from support.families import write_family

    rig = Rig.of_environment()

    def make(faults: Mapping[int, Mapping[str, object]] | None = None) -> Torpor:
        name = f"multi-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        engine = EngineConfig(
            model=str(write_family(tmp_path, "llama", **SHAPE)),
            load_format="dummy",
            dtype="float32",
            max_running=8,
            cuda_graphs="on",
        )
        config = ClusterConfig(
            models=(ModelConfig("toy", engine, rig.ranks, cache_of(rig)),),
            device=DeviceConfig(rig.kind, rig.ranks, HOST_CAPACITY_BYTES, name, faults or {}),
            host_pool=HostPoolConfig(256 * MIB),
            deadlines=Deadlines(drain_s=20, stage_s=30, load_s=240),
            journal_path=str(tmp_path / f"{name}.db"),
            namespace=name,
        )
        return start(config)

    with starting(end_s=60) as start:
        yield make
