"""The ledger as Python programs use it: the native transaction, and what belongs to torch modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torpor.native import _core
from torpor.native.adopt import Adopted, adopt

if TYPE_CHECKING:
    import torch


class Ledger(_core.Ledger):
    """`_core.Ledger` with refresh hooks, and `adopt` for torch modules (torpor/native/adopt.py)."""

    def __init__(
        self,
        device: _core.Device,
        host_pool_bytes: int = 0,
        *,
        host_pool: _core.HostPool | None = None,
        disk_path: str | None = None,
        disk_bytes: int = 0,
    ) -> None:
        super().__init__(
            device, host_pool_bytes, host_pool=host_pool, disk_path=disk_path, disk_bytes=disk_bytes
        )
        self._refresh_hooks: list[Callable[[], None]] = []

    def on_refresh(self, hook: Callable[[], None]) -> None:
        """Run `hook` in every wake's stage, after contents are back. It must be repeatable."""
        self._refresh_hooks.append(hook)

    def stage(self, plan: _core.Plan, timeout_s: float) -> dict[str, Any]:
        report = super().stage(plan, timeout_s)
        if plan.kind == "wake":
            try:
                for hook in self._refresh_hooks:
                    hook()
            except BaseException:
                self.abort()
                raise
        return report

    def adopt(self, module: torch.nn.Module, tag: str = "weights", restore: str = "pinned") -> Adopted:
        """Move the module's parameters and buffers into regions of this ledger (see native/adopt.py)."""
        return adopt(self, module, tag, restore)
