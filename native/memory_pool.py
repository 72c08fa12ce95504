"""Torch's own allocations, CUDA-graph pools among them, in memory that sleeps: a `torch.cuda.MemPool` over an arena.

For engines that allocate by themselves. A pool takes what the thread that entered it allocates, and nothing else:
`use` counts what a module holds outside and says so. Contents are kept by the restore mode that the pool was made
with, or that a sleep names; addresses never change, so that a captured graph replays after every wake (S1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torpor.native import _core
from torpor.native.errors import Misuse

if TYPE_CHECKING:
    import torch

    from torpor.native.ledger import Ledger


class MemoryPool:
    """A torch memory pool of one tag. CUDA only; lives as long as the process (a framework may free into it late)."""

    def __init__(
        self, ledger: Ledger, tag: str, reserve_bytes: int, *, name: str = "", restore: str = "none"
    ) -> None:
        """reserve_bytes: of addresses, the most it may ever hold; takes no memory by itself.

        Misuse on a host device, whose memory torch's CUDA allocators cannot use, and with expandable segments on.
        """
        import torch

        if ledger.device.kind != "cuda":
            raise Misuse(
                "a torch memory pool needs a CUDA device; on a host device use Ledger.create_region or create_arena"
            )
        refuse_expandable_segments()
        self.restore = restore
        self.arena = ledger.create_arena(tag, reserve_bytes, name=name, restore=restore)
        allocate, free = self.arena.hook()
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, allocate, free)
        self.pool = torch.cuda.MemPool(self._allocator.allocator())  # type: ignore[no-untyped-call]

    @property
    def id(self) -> Any:
        """What `torch.cuda.graph(g, pool=…)` takes."""
        return self.pool.id

    @contextmanager
    def use(self, module: torch.nn.Module | None = None) -> Iterator[None]:
        """What this thread allocates inside comes from the pool.

        With a module: Misuse on leaving when storages of it lie outside, for instance since another thread loaded them.
        Torch's OutOfMemoryError gets a note with our reason.
        """
        import torch

        try:
            with torch.cuda.use_mem_pool(self.pool):
                yield
        except torch.cuda.OutOfMemoryError as error:
            if reason := self.arena.hook_error():
                error.add_note(reason)
            raise
        if module is not None:
            self.check(module)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether its storage lies in this pool."""
        at = tensor.untyped_storage().data_ptr()
        return self.arena.address <= at < self.arena.address + self.arena.reserve_bytes

    def check(self, module: torch.nn.Module) -> None:
        """Misuse that names tensors of the module that lie outside, if any do."""
        named = [*module.named_parameters(), *module.named_buffers()]
        outside = [name for name, tensor in named if tensor.numel() > 0 and not self.holds(tensor)]
        if outside:
            raise Misuse(
                f"{len(outside)} tensors lie outside the pool of tag '{self.arena.tag}', {outside[0]} first: make them "
                "inside `use`, on the thread that entered it, or move them with Ledger.adopt"
            )


def expandable_segments(environment: Mapping[str, str]) -> str:
    """The variable that tells torch to use expandable segments; empty if none does."""
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        words = environment.get(variable, "").replace(" ", "").lower()
        if "expandable_segments:true" in words:
            return variable
    return ""


def refuse_expandable_segments() -> None:
    """Misuse when torch is told to use expandable segments: it would not ask the pool for whole segments then."""
    variable = expandable_segments(os.environ)
    if variable:
        raise Misuse(
            f"{variable} turns expandable segments on, with which torch maps memory by itself and a pool cannot "
            "sleep; take expandable_segments out of it and start again"
        )
