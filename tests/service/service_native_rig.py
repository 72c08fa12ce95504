"""The front door over real ranks in this process: coordinator, journal, native ledgers on host devices."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from ranks.caching_toy import CachingToy
from service_fakes import MemoryInference
from service_rig import app_over, client_of

from torpor.actors.config import (
    ClusterConfig,
    Deadlines,
    DeviceConfig,
    EngineConfig,
    HostPoolConfig,
    ModelConfig,
    NodeBudget,
    RankSpec,
)
from torpor.actors.coordinator.coordinator import Coordinator
from torpor.actors.coordinator.journal import Journal
from torpor.actors.rank.core import Parts, RankCore
from torpor.native import Device, FaultyDevice, Ledger

MIB = 1 << 20


@dataclass
class NativeRig:
    http: httpx.AsyncClient
    coordinator: Coordinator
    cores: list[RankCore]
    engines: list[CachingToy]

    @property
    def engine(self) -> CachingToy:
        return self.engines[0]

    def device(self, rank: int = 0) -> FaultyDevice:
        """Whose k-th call may be told to fail."""
        device = self.engines[rank].ledger.device
        assert isinstance(device, FaultyDevice)
        return device

    def free_bytes(self) -> int:
        return int(self.device().memory_info()[0])


@asynccontextmanager
async def native_rig(
    folder: Path,
    model: ModelConfig,
    node: NodeBudget | None = None,
    host_pool: HostPoolConfig | None = None,
    toy: type[CachingToy] = CachingToy,
) -> AsyncIterator[NativeRig]:
    """One model of toy engines with a KV cache; each rank has a host device of 8 MiB of its own."""
    name = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    ranks = range(model.tensor_parallel)
    config = ClusterConfig(
        models=(model,),
        device=DeviceConfig("host", model.tensor_parallel, 8 * MIB, name, {rank: {} for rank in ranks}),
        deadlines=Deadlines(drain_s=2.0, preflight_s=2.0, stage_s=5.0, commit_s=5.0),
        node=node or NodeBudget(),
        host_pool=host_pool or HostPoolConfig(4 * MIB),
        journal_path=str(folder / "journal.db"),
    )
    engines: list[CachingToy] = []

    def engine(spec: RankSpec, ledger: Ledger, device: Device) -> CachingToy:
        engines.append(toy(spec, ledger, device))
        return engines[-1]

    cores = []
    for rank in ranks:
        spec = RankSpec(
            model, rank, f"incarnation-{rank}", config.device, rank, config.host_pool.bytes, node=config.node
        )
        cores.append(RankCore(spec, Parts(make_engine=engine), node="here"))
        await cores[-1].load()
    journal = await Journal.open(config.journal_path)
    coordinator = Coordinator(config, journal, host_limit_bytes=config.node.host_bytes or 1 << 30)
    await coordinator.attach(model.name, cores)
    await coordinator.start()
    app = app_over(coordinator, MemoryInference((model.name,)), config, io.StringIO())
    try:
        async with client_of(app) as http:
            yield NativeRig(http, coordinator, cores, engines)
            await app.state.context.inference.close()
    finally:
        await coordinator.close()
        await journal.close()
        for core in cores:
            await core.close()


def caching_model(**fields: object) -> ModelConfig:
    return ModelConfig("toy", EngineConfig("toy"), **fields)  # type: ignore[arg-type]
