"""How often each caller may come: one bucket of tokens for each, in bounded memory."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torpor.service.problems import Code, Problem

_REMEMBERED = 10_000  # callers; addresses can be made up by the million


@dataclass(slots=True)
class _Bucket:
    level: float
    filled_s: float


class Rates:
    """per_s None: nobody is counted."""

    def __init__(
        self,
        per_s: float | None,
        burst: int,
        refused: Callable[[str], None] = lambda limit: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._refused = refused
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def count(self, who: str) -> None:
        """One request more. Raises a Problem when they come too fast; it says when to come again."""
        if self._per_s is None:
            return
        now_s = self._clock()
        bucket = self._buckets.get(who)
        if bucket is None:
            bucket = self._buckets[who] = _Bucket(float(self._burst), now_s)
            if len(self._buckets) > _REMEMBERED:
                self._buckets.popitem(last=False)  # who has not come for longest, and has a full one again
        self._buckets.move_to_end(who)
        bucket.level = min(float(self._burst), bucket.level + (now_s - bucket.filled_s) * self._per_s)
        bucket.filled_s = now_s
        if bucket.level >= 1.0:
            bucket.level -= 1.0
            return
        self._refused("rate")
        wait_s = math.ceil((1.0 - bucket.level) / self._per_s)
        raise Problem(
            429,
            Code.TOO_MANY_REQUESTS,
            f"{who} sends more than {self._per_s:g} requests a second (limits.requests_per_s).",
            hint="Repeat after the time in Retry-After; nothing was begun.",
            headers={"Retry-After": str(wait_s)},
        )
