"""How an operation is wanted: modes and policies, as messages and configurations name them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RestoreMode(StrEnum):
    NONE = "none"
    MEMSET = "memset"
    CPU = "cpu"
    PINNED = "pinned"
    DISK = "disk"

    @property
    def preserves(self) -> bool:
        return self not in (RestoreMode.NONE, RestoreMode.MEMSET)


class DrainMode(StrEnum):
    FINISH = "finish"
    ABORT = "abort"
    FREEZE = "freeze"  # running requests stop between two tokens and go on after the wake
    IF_IDLE = "if_idle"  # refuse unless nothing runs or waits


class OnConflict(StrEnum):
    REJECT = "reject"
    WAIT = "wait"


class OnExpiry(StrEnum):
    """What becomes of a hold when its lease is not renewed in time."""

    KEEP = "keep"  # it stays, without a lease
    WAKE = "wake"


class MakeRoom(StrEnum):
    """What a wake that finds no device memory may do."""

    NONE = "none"
    IDLE = "idle"  # put idle neighbours to sleep, least recently used first


class OnDiscard(StrEnum):
    """What a wake does about weights that come back without contents."""

    RELOAD = "reload"  # reads them from the model's source, where that has what was published
    WAIT = "wait"  # leaves them so until the next update; the gate stays closed


@dataclass(frozen=True, slots=True)
class DrainSpec:
    mode: DrainMode = DrainMode.FINISH
    timeout_s: float | None = None  # None: the configured deadline
    freeze_timeout_s: float | None = None  # frozen requests end with `abort` after so long; None: never
