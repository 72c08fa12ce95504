"""P7's engine, which has next to no memory, and the bare actors beside it."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ranks.toys import ToyEngine

from torpor.actors.config import RankSpec
from torpor.native import Device, Ledger

BYTES = 64 << 10
ROUND_TRIPS, WRITES = 5, 2
ROW_BYTES = 1024


class TinyEngine(ToyEngine):
    def load(self) -> None:
        self.ledger.create_region("weights", BYTES, name="weights", restore="none")
        self.ledger.create_region("kv_cache", BYTES, name="kv", restore="none")


def make_engine(spec: RankSpec, ledger: Ledger, device: Device) -> TinyEngine:
    """For `engine.kind`."""
    return TinyEngine(spec, ledger, device)


class Echo:
    """A rank that does nothing."""

    async def answer(self, call: Any) -> Any:
        return call


class Asker:
    """A coordinator that does nothing: it asks in parallel, and writes rows as a journal does, in a thread."""

    def __init__(self, ranks: list[Any], path: str) -> None:
        self._ranks = ranks
        self._path = Path(path)
        self._writer = ThreadPoolExecutor(1)
        self._db: sqlite3.Connection | None = None

    async def round_trips_s(self) -> float:
        """Five, one after the other, each to all ranks at once."""
        began_s = time.perf_counter()
        for _ in range(ROUND_TRIPS):
            await asyncio.gather(*(rank.answer.remote({"phase": "none"}) for rank in self._ranks))
        return time.perf_counter() - began_s

    async def writes_s(self) -> float:
        """Two, each on the disk before the next."""
        loop = asyncio.get_running_loop()
        began_s = time.perf_counter()
        for _ in range(WRITES):
            await loop.run_in_executor(self._writer, self._write)
        return time.perf_counter() - began_s

    def _write(self) -> None:
        if self._db is None:
            self._db = sqlite3.connect(self._path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("CREATE TABLE IF NOT EXISTS rows (body TEXT)")
        self._db.execute("INSERT INTO rows VALUES (?)", ("x" * ROW_BYTES,))
