"""The requests of one front end that wait for one model: in order, so many, so long (G3)."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torpor.actors.config import GateConfig
from torpor.actors.ports import GateClosed
from torpor.service.gate.policy import NotLetIn

FIRST_PAUSE_S = 0.02  # before those who came back in vain may try again
LONGEST_PAUSE_S = 0.5


class QueueCounts(Protocol):
    def count_waiting(self, model: str, change: int) -> None: ...

    def observe_wait(self, model: str, seconds: float) -> None: ...


@dataclass(eq=False, order=False)
class Visitor:
    """A request on its way in. It keeps its number, and so its place, however often it has to come back."""

    number: int
    arrived_s: float
    released: asyncio.Future[None] | None = None
    waited: bool = False


@dataclass(eq=False)
class Door:
    """keep: is called whenever somebody waits, to see to it that they are let in or refused some day."""

    model: str
    config: GateConfig
    counts: QueueCounts
    keep: Callable[[Door], None]
    reason: str = ""  # why the gate is closed, as last heard
    detail: str = ""  # what keeps it closed, for people
    pause_s: float = 0.0  # before the next release
    _waiting: list[Visitor] = field(default_factory=list)
    _on_their_way: set[Visitor] = field(default_factory=set)  # released, and not gone on yet
    _placed: set[Visitor] = field(
        default_factory=set
    )  # have waited, and may have to again: not in, and not gone
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def arrive(self) -> Visitor:
        return Visitor(next(self._numbers), _now())

    @property
    def occupied(self) -> bool:
        return bool(self._waiting)

    @property
    def busy(self) -> bool:
        """Whoever comes now comes after others."""
        return bool(self._waiting or self._on_their_way)

    async def wait(self, visitor: Visitor, reason: str = "") -> None:
        """Until it may try. Raises NotLetIn, or what the keeper refuses it with."""
        self.reason = reason or self.reason
        if visitor in self._placed:
            self.pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self.pause_s))
        elif len(self._placed) >= self.config.queue_limit:
            raise NotLetIn(self.reason, f"{self.config.queue_limit} requests wait for it already", full=True)
        self._placed.add(visitor)
        visitor.waited = True
        visitor.released = asyncio.get_running_loop().create_future()
        bisect.insort(self._waiting, visitor, key=lambda one: one.number)
        self.counts.count_waiting(self.model, 1)
        self.keep(self)
        try:
            async with asyncio.timeout_at(visitor.arrived_s + self.config.queue_timeout_s):
                await visitor.released
        except TimeoutError:
            why = f"it waited {self.config.queue_timeout_s:g} s" + (f"; {self.detail}" if self.detail else "")
            raise NotLetIn(self.reason, why, full=False) from None
        finally:
            self._on_their_way.discard(visitor)
            if visitor in self._waiting:
                self._waiting.remove(visitor)
            self.counts.count_waiting(self.model, -1)

    def entered(self, visitor: Visitor) -> None:
        """It was admitted."""
        self.left(visitor)
        self.pause_s = 0.0
        if visitor.waited:
            self.counts.observe_wait(self.model, _now() - visitor.arrived_s)

    def left(self, visitor: Visitor) -> None:
        """Its place is free, whether it is in or gone; again does no harm."""
        self._placed.discard(visitor)

    def release_all(self) -> None:
        """Everybody may try, in order."""
        waiting, self._waiting = self._waiting, []
        for visitor in waiting:
            if visitor.released is not None and not visitor.released.done():
                self._on_their_way.add(visitor)
                visitor.released.set_result(None)

    def turn_away(self, visitor: Visitor, error: Exception) -> bool:
        """This one alone; False: it does not wait."""
        if visitor not in self._waiting or visitor.released is None or visitor.released.done():
            return False
        self._waiting.remove(visitor)
        visitor.released.set_exception(error)
        return True

    def refuse_all(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, []
        for visitor in waiting:
            if visitor.released is not None and not visitor.released.done():
                visitor.released.set_exception(_copy(error))


def _copy(error: Exception) -> Exception:
    """One for each: an exception that is raised in several tasks gathers the traces of all."""
    if type(error) is GateClosed:
        return GateClosed(error.reason, str(error))
    return error


def _now() -> float:
    return asyncio.get_running_loop().time()
