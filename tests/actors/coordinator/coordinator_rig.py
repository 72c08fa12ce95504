"""One cluster of in-process ranks and one journal file, on which coordinators come and go."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from coordinator_memory_journal import JournalStore, MemoryJournal
from coordinator_virtual_time import run

from torpor.actors.config import ClusterConfig, DeviceConfig, ModelConfig
from torpor.actors.coordinator import Coordinator, Journal, MemoryCluster, MemoryMaker, MemoryRank
from torpor.actors.messages import Kind, LedgerPhase, Operation, OperationRequest

MIB = 1 << 20
WEIGHTS_BYTES, KV_BYTES = 100 * MIB, 50 * MIB
RANK_BYTES = WEIGHTS_BYTES + KV_BYTES
SIZES = {"weights": WEIGHTS_BYTES, "kv_cache": KV_BYTES}
CONFIG = ClusterConfig(
    models=(ModelConfig("chat", tensor_parallel=3), ModelConfig("solo")),
    device=DeviceConfig(host_capacity_bytes=2 * RANK_BYTES),
)
SLEEP = OperationRequest(Kind.SLEEP, "chat")
WAKE = OperationRequest(Kind.WAKE, "chat")
PATIENCE_S = 1000.0  # of virtual time: longer than all deadlines of an operation together


class Rig:
    """Start and restart coordinators over the same ranks. now_s is the wall clock that they see."""

    def __init__(
        self, journal_path: Path, config: ClusterConfig = CONFIG, host_limit_bytes: int = 1 << 40
    ) -> None:
        self.config = config
        self.journal_path = journal_path
        self.cluster = MemoryCluster.build(config, SIZES)
        self.host_limit_bytes = host_limit_bytes
        self.now_s = 1e9
        self.maker: MemoryMaker | None = None  # with one, the coordinator finds, makes and ends the ranks
        self.journal: Journal
        self.coordinator: Coordinator
        self._ids = itertools.count(1)

    def with_maker(self) -> MemoryMaker:
        """Before the start."""
        self.maker = MemoryMaker(self.cluster, SIZES)
        return self.maker

    @property
    def chat(self) -> list[MemoryRank]:
        return self.cluster.ranks["chat"]

    @property
    def solo(self) -> MemoryRank:
        return self.cluster.ranks["solo"][0]

    def run(self, story: Callable[[], Awaitable[None]]) -> None:
        """The story with a started coordinator, in virtual time."""

        async def whole() -> None:
            await self.start()
            try:
                await story()
            finally:
                await self.stop()

        run(whole())

    async def prepare(self) -> None:
        """A coordinator that has its ranks, and has not started."""
        self.journal = await self._open_journal()
        models = await self.journal.models("one birth", self.config.models)
        self.coordinator = Coordinator(
            replace(self.config, models=tuple(models)),
            self.journal,
            host_limit_bytes=self.host_limit_bytes,
            now=lambda: self.now_s,
            new_id=lambda: f"op-{next(self._ids)}",
            maker=self.maker,
        )
        if self.maker is not None:
            return
        for model, ranks in self.cluster.ranks.items():
            await self.coordinator.attach(model, ranks)

    async def _open_journal(self) -> Journal:
        journal = await Journal.open(self.journal_path)
        # Here processes die and machines do not: what was written can be read again without waiting for the disk.
        await journal._run(lambda journal: journal._db.execute("PRAGMA synchronous=OFF").close())
        return journal

    async def start(self) -> Coordinator:
        await self.prepare()
        await self.coordinator.start()
        return self.coordinator

    async def stop(self) -> None:
        """As a crash: whatever runs is dropped where it is."""
        await self.coordinator.close()
        await self.journal.close()

    async def restart(self) -> Coordinator:
        await self.stop()
        return await self.start()

    async def do(self, request: OperationRequest) -> Operation:
        """Submit and wait for the outcome."""
        submitted = await self.coordinator.submit(request)
        return await self.coordinator.wait(submitted.id, PATIENCE_S)

    def loop_time(self) -> float:
        return asyncio.get_running_loop().time()

    def free_bytes(self) -> list[int]:
        return [device.free_bytes for device in self.cluster.devices]

    def parked(self, model: str = "chat") -> list[set[str]]:
        return [set(rank.ledger.parked) for rank in self.cluster.ranks[model]]

    def gate_open(self, model: str = "chat") -> bool:
        return self.cluster.ranks[model][0].gate.open

    def assert_untouched(self, free_bytes: list[int], model: str = "chat") -> None:
        """Memory, tags and gate as at the start; nothing staged, nothing kept, nothing promised."""
        assert self.free_bytes() == free_bytes
        for rank in self.cluster.ranks[model]:
            assert not rank.ledger.parked and not rank.ledger.kept
            assert rank.ledger.phase is LedgerPhase.IDLE
        assert self.gate_open(model)


class MemoryRig(Rig):
    """Its journal is in memory, too: nothing here waits for a disk or a thread."""

    def __init__(self, store: JournalStore, config: ClusterConfig = CONFIG, **limits: int) -> None:
        super().__init__(Path("memory"), config, **limits)
        self.store = store

    async def _open_journal(self) -> Journal:
        return MemoryJournal(self.store)


def asking(kind: Kind, model: str = "chat", **fields: object) -> OperationRequest:
    return replace(OperationRequest(kind, model), **fields)  # type: ignore[arg-type]
