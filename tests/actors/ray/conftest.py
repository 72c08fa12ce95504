"""One real local Ray for this folder; each test has its Torpor in a namespace of its own."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import ray
from ranks.torpors import CAPACITY_BYTES, ENGINE, MIB, MakeTorpor, Torpor, starting

from torpor.actors.cluster import start_local
from torpor.actors.config import (
    ClusterConfig,
    Deadlines,
    DeviceConfig,
    EngineConfig,
    HostPoolConfig,
    KvCacheConfig,
    ModelConfig,
    RecoverPolicy,
)


def _global_node() -> ray._private.node.Node:
    return ray._private.worker._global_node


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        here = str(Path(__file__).parents[2])
        paths = [path for path in (here, os.environ.get("PYTHONPATH", "")) if path]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        journal = tmp_path_factory.mktemp("journal") / "journal.db"
        cluster = start_local(
            ClusterConfig(models=(), device=DeviceConfig(kind="host"), journal_path=str(journal))
        )
        processes = [info.process for infos in _global_node().all_processes.values() for info in infos]
        assert processes
        yield
        cluster.shutdown()
        for process in processes:
            process.wait(10)  # all that was started has ended


@pytest.fixture
def make_torpor(local_ray: None, tmp_path: Path) -> Iterator[MakeTorpor]:
    def make(
        ranks: int = 1,
        models: tuple[str, ...] = ("toy",),
        faults: Mapping[int, Mapping[str, object]] | None = None,
        engine: EngineConfig = ENGINE,
        deadlines: Deadlines | None = None,
        kind: str = "host",
        kv_cache: KvCacheConfig | None = None,
        journal_path: str | None = None,
        recover: RecoverPolicy = RecoverPolicy.MANUAL,  # most tests look at what has failed
        adapt: Callable[[ClusterConfig], ClusterConfig] = lambda config: config,
    ) -> Torpor:
        name = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        config = ClusterConfig(
            models=tuple(
                ModelConfig(model, engine, ranks, kv_cache or KvCacheConfig(), recover=recover)
                for model in models
            ),
            device=DeviceConfig(kind, ranks, CAPACITY_BYTES, name, faults or {}),
            host_pool=HostPoolConfig(64 * MIB),
            deadlines=deadlines or Deadlines(drain_s=10, stage_s=10, load_s=120),
            journal_path=journal_path or str(tmp_path / f"{name}.db"),
            namespace=name,
        )
        return start(adapt(config))

    with starting() as start:
        yield make
