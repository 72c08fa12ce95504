"""The ledger of a rank, which remembers the KV managers that were made in it."""

from __future__ import annotations

from typing import Any

from torpor.native import KvManager, Ledger


class RankLedger(Ledger):
    """A Ledger that can say how many tokens of prefix its managers hold, whichever engine made them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._managers: list[KvManager] = []

    def create_kv_manager(self, *arguments: Any, **options: Any) -> KvManager:
        manager = super().create_kv_manager(*arguments, **options)
        self._managers.append(manager)
        return manager

    def prefix_tokens(self) -> int:
        """Tokens that new sequences could find. Waits for a manager that moves pages."""
        return sum(manager.stats()["prefix_tokens"] for manager in self._managers)

    def let_go(self) -> None:
        """Drop the managers, for their memory to go when the engine drops them too."""
        self._managers.clear()
