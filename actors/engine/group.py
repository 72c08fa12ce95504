"""The process group of a model's ranks, in which one step's sums are made: NCCL where each rank has a GPU of its own.

NCCL may not register buffers that a captured graph sends from: their memory goes and comes back at the same addresses,
and replays then wait for ever (F24).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _abort_process_group, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from torpor.actors.engine.errors import ModelRefused
from torpor.native.errors import TorporError

NCCL, GLOO = "nccl", "gloo"
SETTINGS = ("auto", GLOO)  # of `engine.collectives`
REGISTER = "NCCL_GRAPH_REGISTER"
WATCHDOG_SHARE = (
    1.5  # of a step's time-out: NCCL's watchdog ends the whole process, so the step loop comes first
)


def check_collectives(wanted: str) -> None:
    """wanted: as `engine.collectives` has it. Raises ModelRefused."""
    if wanted not in SETTINGS:
        raise ModelRefused(f"engine.collectives {wanted!r} is unknown; known: {', '.join(SETTINGS)}")


def choose_backend(offers: Sequence[str]) -> str:
    """The same on every rank. offers: of each rank, the GPU that it would use NCCL on, or "" where it cannot."""
    alone = len(set(offers)) == len(offers)
    return NCCL if all(offers) and alone else GLOO


class RankGroup:
    """The default process group of this process; one rank a process. With one rank every call is free.

    gpu: this rank's, by a name that no other GPU has; "": it has none, or is not to use NCCL. device: torch's name for
    it. join_timeout_s: for ranks that load at different speeds. step_timeout_s: of one collective. Between steps none is
    pending, so that a sleep of any length meets neither (F29).
    """

    def __init__(
        self,
        address: str,
        rank: int,
        ranks: int,
        join_timeout_s: float,
        step_timeout_s: float,
        gpu: str = "",
        device: torch.device | None = None,
    ) -> None:
        self._address = address
        self._rank = rank
        self._ranks = ranks
        self._join_timeout_s = join_timeout_s
        self._step_timeout_s = step_timeout_s
        self._gpu = gpu if dist.is_nccl_available() else ""
        self._device = device
        self._store: Store | None = None
        self._joined = False
        self.backend = GLOO  # once joined: the one that was chosen

    def join(self) -> None:
        """Wait for the other ranks. Raises TorporError."""
        if self._ranks == 1:
            return
        wait = timedelta(seconds=self._join_timeout_s)
        try:
            meeting = rendezvous(f"tcp://{self._address}", self._rank, self._ranks, timeout=wait)
            self._store, _, _ = next(meeting)
            self._store.set_timeout(wait)
            self.backend = choose_backend(self._tell("gpu", self._gpu))
            self._init(wait)
        except (RuntimeError, ValueError, OSError) as error:
            raise TorporError(
                f"rank {self._rank} could not join its group at {self._address}: {error}"
            ) from error
        self._joined = True
        share = WATCHDOG_SHARE if self.backend == NCCL else 1.0
        _set_pg_timeout(timedelta(seconds=share * self._step_timeout_s))

    def agree(self, question: str, yes: bool) -> bool:
        """Whether all ranks say yes; each asks the same question once. Raises TorporError."""
        if self._ranks == 1:
            return yes
        try:
            return all(answer == "yes" for answer in self._tell(question, "yes" if yes else "no"))
        except RuntimeError as error:
            raise TorporError(f"rank {self._rank} heard nothing of {question!r}: {error}") from error

    def leave(self) -> None:
        """In good order: what this rank has begun is finished first. Repeatable."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    def abort(self) -> None:
        """After an error: whatever any rank still waits for in a collective ends with one, too. Repeatable."""
        if self._joined and self.backend == NCCL:
            self._joined = False
            _abort_process_group()
        self.leave()

    def _tell(self, key: str, value: str) -> list[str]:
        """What each rank says under this key."""
        assert self._store is not None
        keys = [f"torpor/{key}/{rank}" for rank in range(self._ranks)]
        self._store.set(keys[self._rank], value)
        return [self._store.get(each).decode() for each in keys]  # each waits

    def _init(self, wait: timedelta) -> None:
        assert self._store is not None
        device = None
        if self.backend == NCCL:
            os.environ[REGISTER] = "0"  # NCCL reads it when it makes its first communicator
            device = self._device  # connects at once: what is amiss is found here, not in the first step
        dist.init_process_group(
            self.backend,
            store=PrefixStore("torpor", self._store),
            rank=self._rank,
            world_size=self._ranks,
            timeout=wait,
            device_id=device,
        )
