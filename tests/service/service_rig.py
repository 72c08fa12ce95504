"""Builds the front door over an in-memory cluster."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from service_fakes import MemoryInference

from torpor.actors.config import ClusterConfig, Deadlines, DeviceConfig, GateConfig, ModelConfig
from torpor.actors.coordinator.coordinator import Coordinator
from torpor.actors.coordinator.journal import Journal
from torpor.actors.coordinator.memory import MemoryCluster, MemoryRank
from torpor.actors.coordinator.memory_maker import MemoryMaker
from torpor.actors.messages import GateReason
from torpor.actors.ports import Control
from torpor.service.app import create_app
from torpor.service.auth.tokens_file import TokensFile
from torpor.service.gate.gates import Gates
from torpor.service.logs import make_logger

GIB = 1 << 30
GATE = GateConfig(retry_after_s=3)


@dataclass
class Rig:
    app: FastAPI
    http: httpx.AsyncClient
    coordinator: Coordinator
    cluster: MemoryCluster
    inference: MemoryInference
    log: io.StringIO

    def rank(self, model: str = "chat", rank: int = 0) -> MemoryRank:
        return self.cluster.ranks[model][rank]

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


def config_of(models: Mapping[str, int], journal: Path, gate: GateConfig = GATE) -> ClusterConfig:
    return ClusterConfig(
        models=tuple(
            ModelConfig(name=name, tensor_parallel=ranks, gate=gate) for name, ranks in models.items()
        ),
        device=DeviceConfig(kind="host", count=max(models.values(), default=1), host_capacity_bytes=GIB),
        deadlines=Deadlines(drain_s=2.0, preflight_s=2.0, stage_s=2.0, commit_s=2.0),
        journal_path=str(journal),
    )


def gate_of(cluster: MemoryCluster, model: str) -> GateReason | None:
    gate = cluster.ranks[model][0].gate
    return None if gate.open else gate.reason or GateReason.FAILED


@asynccontextmanager
async def make_rig(
    folder: Path,
    models: Mapping[str, int],
    gate: GateConfig = GATE,
    making: bool = False,
    tokens: str | None = None,
    **more: Any,
) -> AsyncIterator[Rig]:
    """making: the coordinator makes and ends ranks, too. tokens: the text of a tokens file. more: as of create_app."""
    config = config_of(models, folder / "journal.db", gate)
    cluster = MemoryCluster.build(config)
    journal = await Journal.open(config.journal_path)
    maker = MemoryMaker(cluster) if making else None
    coordinator = Coordinator(config, journal, host_limit_bytes=8 * GIB, maker=maker)
    for name in models if maker is None else ():
        await coordinator.attach(name, cluster.ranks[name])
    await coordinator.start()
    inference = MemoryInference(tuple(models), gate=lambda model: gate_of(cluster, model))
    log = io.StringIO()
    file = tokens_file(folder, tokens, log) if tokens is not None else None
    app = app_over(coordinator, inference, config, log, tokens=file, **more)
    async with client_of(app) as http:
        yield Rig(app, http, coordinator, cluster, inference, log)
        await app.state.context.inference.close()
    await coordinator.close()
    await journal.close()


def app_over(
    control: Control, inference: MemoryInference, config: ClusterConfig, log: io.StringIO, **more: Any
) -> FastAPI:
    """more: as of create_app."""
    return create_app(control, inference, logger=make_logger(log), gates=Gates(config, control), **more)


def tokens_file(folder: Path, text: str, log: io.StringIO) -> TokensFile:
    path = folder / "tokens"
    path.write_text(text)
    return TokensFile(path, make_logger(log))


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://torpor.test")
