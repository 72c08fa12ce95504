"""The gloo process group of a model's ranks, in which one step's sums are made."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from torpor.native.errors import TorporError


class RankGroup:
    """The default process group of this process; one rank a process. With one rank every call is free.

    join_timeout_s: for ranks that load at different speeds. step_timeout_s: of one collective. Between steps none is
    pending, so that a sleep of any length meets neither (F29).
    """

    def __init__(
        self, address: str, rank: int, ranks: int, join_timeout_s: float, step_timeout_s: float
    ) -> None:
        self._address = address
        self._rank = rank
        self._ranks = ranks
        self._join_timeout_s = join_timeout_s
        self._step_timeout_s = step_timeout_s
        self._joined = False

    def join(self) -> None:
        """Wait for the other ranks. Raises TorporError."""
        if self._ranks == 1:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{self._address}",
                rank=self._rank,
                world_size=self._ranks,
                timeout=timedelta(seconds=self._join_timeout_s),
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise TorporError(
                f"rank {self._rank} could not join its group at {self._address}: {error}"
            ) from error
        self._joined = True
        _set_pg_timeout(timedelta(seconds=self._step_timeout_s))

    def leave(self) -> None:
        """Repeatable. Whatever other ranks still wait for in a collective ends with an error."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()
