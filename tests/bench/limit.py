"""A benchmark's time: turns that fit into what is left of it, and an end that comes whatever runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable


class Budget:
    """Seconds until the limit, and how long a turn of each kind took last."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._until = now() + limit_s
        self._took_s: dict[str, float] = {}

    @property
    def left_s(self) -> float:
        return self._until - self._now()

    def take(self, kind: str, turn: Callable[[], None], first_s: float = 0.0) -> bool:
        """Do it, if it is to end in time by what it took last; first_s: what is expected of the first. Whether it did."""
        if self.left_s < self._took_s.get(kind, first_s):
            return False
        began = self._now()
        turn()
        self._took_s[kind] = self._now() - began
        return True


def keep_at(limit_s: float, keep: Callable[[], None]) -> threading.Timer:
    """When the limit comes, whatever runs: keep what there is, and end the process."""

    def end() -> None:
        keep()
        os._exit(0)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    return timer
