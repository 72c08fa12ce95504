"""The journal in this process's memory: the same tables and statements, no file, no thread, virtual time."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torpor.actors.coordinator import Journal, JournalError
from torpor.actors.coordinator.journal_schema import migrate


class JournalStore:
    """What a file is to a journal: it outlives the coordinators, and can be read at any moment.

    latency_s: how long a call waits, before it has its effect and once more after it. refusals: how many of the
    next calls of a name (of Journal's work on its thread, e.g. "_decide") find the disk full.
    """

    def __init__(self, latency_s: Callable[[], float] = lambda: 0.0) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        self.latency_s = latency_s
        self.refusals: Counter[str] = Counter()
        migrate(self.db)
        self.db.execute("INSERT INTO meta VALUES ('id', 'in memory')")

    def is_decided(self, operation: str) -> bool:
        row = self.db.execute("SELECT decided FROM operations WHERE id = ?", (operation,)).fetchone()
        return row is not None and bool(row[0])


class MemoryJournal(Journal):
    """One call after another, as the writer's thread has it; a caller that is gone before its turn writes nothing."""

    def __init__(self, store: JournalStore) -> None:
        super().__init__(Path("memory"))
        self._store = store
        self._turn = asyncio.Lock()
        self._connection = store.db
        self.id = self._meta("id")

    async def close(self) -> None:
        self._connection = None
        self._writer.shutdown(wait=False)

    async def _run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async with self._turn:
            await asyncio.sleep(self._store.latency_s())
            if self._store.refusals[work.__name__] > 0:
                self._store.refusals[work.__name__] -= 1
                raise JournalError("no room on the disk, as scripted")
            result = work(self, *args, **kwargs)
            await asyncio.sleep(self._store.latency_s())
            return result
