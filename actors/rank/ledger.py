"""The ledger of a rank, which remembers the KV caches that were made in it."""

from __future__ import annotations

import threading
import time
from typing import Any

from torpor.actors.rank.replies import WITHOUT_CONTENTS
from torpor.native import KvManager, Ledger, Plan


class RankLedger(Ledger):
    """A Ledger that can say how many tokens of prefix its managers hold, whichever engine made them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._prefilling = threading.Lock()
        self._managers: dict[tuple[str, str], KvManager] = {}  # by tag and name

    def create_kv_manager(self, *arguments: Any, **options: Any) -> KvManager:
        return self._remember(super().create_kv_manager(*arguments, **options), options)

    def create_kv_cache(self, *arguments: Any, **options: Any) -> KvManager:
        return self._remember(super().create_kv_cache(*arguments, **options), options)

    def prefix_tokens(self) -> int:
        """Tokens that new sequences could find. Waits for a manager that moves pages."""
        return sum(_prefix_tokens(manager) for manager in self._managers.values())

    def prefix_tokens_lost_by(self, plan: Plan) -> int:
        """How many of them this plan would drop: those that find no room, and all of what is not preserved."""
        if plan.kind != "sleep":
            return 0
        discarded = [
            _prefix_tokens(self._managers[row["tag"], row["name"]])
            for row in plan.items
            if row["mode"] in WITHOUT_CONTENTS
            and not row["noop"]
            and (row["tag"], row["name"]) in self._managers
        ]
        return sum(discarded) + int(plan.evicts["prefix_tokens"])

    def prefill(self, room_bytes: int, timeout_s: float, backups: bool, pool: bool) -> int:
        """As ports.RankPort.prefill. Raises what keeps it from that: OutOfHostMemory, OutOfDisk, DeviceError."""
        with self._prefilling:
            began = time.monotonic()
            # Backups first: they would drive idle memory out of the pool's bound.
            saved_bytes = self.prefill_backups(timeout_s, room_bytes) if backups else 0
            left_s = timeout_s - (time.monotonic() - began)
            made_bytes = self.fill_host_pool(left_s, max(0, room_bytes - saved_bytes)) if pool else 0
        return saved_bytes + made_bytes

    def let_go(self) -> None:
        """Drop the managers, for their memory to go when the engine drops them too."""
        self._managers.clear()

    def _remember(self, manager: KvManager, options: dict[str, Any]) -> KvManager:
        self._managers[options.get("tag", "kv_cache"), options.get("name", "")] = manager
        return manager


def _prefix_tokens(manager: KvManager) -> int:
    return int(manager.stats()["prefix_tokens"])
