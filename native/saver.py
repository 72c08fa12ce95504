"""Pause and resume by tag, for code that knows such calls from torch_memory_saver: one transaction of the ledger each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from torpor.native.errors import Misuse
from torpor.native.ledger import Ledger
from torpor.native.memory_pool import MemoryPool

GIB = 1 << 30


class MemorySaver:
    """Pools of tagged memory over one ledger. Not for two threads at a time."""

    def __init__(self, ledger: Ledger, *, reserve_bytes: int = 256 * GIB, timeout_s: float = 60.0) -> None:
        """reserve_bytes: of addresses for each tag. timeout_s bounds each pause and resume."""
        self.ledger = ledger
        self._reserve_bytes = reserve_bytes
        self._timeout_s = timeout_s
        self._pools: dict[str, MemoryPool] = {}
        self._count = itertools.count(1)

    @contextmanager
    def region(self, tag: str = "default", restore: str = "none") -> Iterator[MemoryPool]:
        """What this thread allocates inside belongs to the tag. restore: what becomes of it over a pause, see the README.

        Misuse when the tag was begun with another mode.
        """
        pool = self._pools.get(tag)
        if pool is None:
            pool = self._pools[tag] = MemoryPool(self.ledger, tag, self._reserve_bytes, restore=restore)
        elif pool.restore != restore:
            raise Misuse(f"tag '{tag}' was begun with restore mode {pool.restore}; use that, or another tag")
        with pool.use():
            yield pool

    def pause(self, tag: str | None = None) -> int:
        """Put the tag (None: every tag of this saver) to sleep; returns the bytes given back. Paused ones stay so."""
        return self._transact("sleep", tag)

    def resume(self, tag: str | None = None) -> int:
        """Wake the tag (None: every tag); returns the bytes taken. OutOfDeviceMemory leaves it asleep and whole."""
        return self._transact("wake", tag)

    def _transact(self, kind: str, tag: str | None) -> int:
        if tag is not None and tag not in self._pools:
            raise Misuse(f"no tag '{tag}' here; there are: {', '.join(sorted(self._pools)) or 'none yet'}")
        tags = sorted(self._pools) if tag is None else [tag]
        plan = self.ledger.preflight(kind, f"{kind}-{next(self._count)}", tags=tags)
        self.ledger.stage(plan, self._timeout_s)
        report = self.ledger.commit()
        self.ledger.publish()
        return int(report["freed_bytes"] if kind == "sleep" else report["device_bytes"])
