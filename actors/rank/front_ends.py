"""What flows back to the front ends: one batched stream of events each, kept alive by a lease (G4).

The step thread puts events in and never waits. A front end that reads slowly finds the events of one request merged
into one, so that what waits here is bounded by the requests that run and by the tokens that each may have.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torpor.actors.generation import AbortOrder, is_meant
from torpor.actors.messages import TokenEvent
from torpor.actors.rank.events import merged

LEASE_S = 10.0
Clock = Callable[[], float]


class DuplicateRequest(Exception):
    """A request with this id is still running."""


@dataclass(slots=True)
class Request:
    """One request from its arrival to its last event. cancelled: its front end or client is gone.

    probe: as of GenerateRequest.
    """

    id: str
    front_end: str
    probe: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class _Reader:
    """The one stream that reads a front end's events, in whichever event loop it runs."""

    loop: asyncio.AbstractEventLoop
    ready: asyncio.Event

    def wake(self) -> None:
        # The loop may have been closed with its reader still noted: nobody is left to wake.
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.ready.set)


@dataclass(slots=True)
class _FrontEnd:
    lease_ends_at: float
    pending: dict[str, TokenEvent] = field(default_factory=dict)
    orders: list[AbortOrder] = field(default_factory=list)  # not read yet
    unanswered: dict[str, Future[int]] = field(default_factory=dict)  # by order
    reader: _Reader | None = None


class FrontEnds:
    """Who asked for what, and what is still to be told them. Thread-safe."""

    def __init__(self, clock: Clock, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._front_ends: dict[str, _FrontEnd] = {}
        self._requests: dict[str, Request] = {}
        self._quiet_since = clock()
        self._orders = itertools.count(1)

    def idle_s(self) -> float:
        """Since the last request came or ended; 0 while any is here. Probes are none."""
        with self._lock:
            busy = any(not one.probe for one in self._requests.values())
            return 0.0 if busy else self._clock() - self._quiet_since

    def renew(self, front_end: str) -> None:
        """Begin or lengthen the lease."""
        with self._lock:
            self._renew(front_end)

    def add(self, front_end: str, request: str, probe: bool = False) -> Request:
        """Note a request that arrives. Raises DuplicateRequest."""
        with self._lock:
            if request in self._requests:
                raise DuplicateRequest(
                    f"a request with the id {request!r} is still running; choose another id"
                )
            self._renew(front_end)
            entry = self._requests[request] = Request(request, front_end, probe)
            return entry

    def remove(self, request: str) -> None:
        """Forget a request that was not admitted."""
        with self._lock:
            self._forget(request)

    def cancel(self, front_end: str, requests: Iterable[str]) -> list[str]:
        """Mark those of this front end as cancelled; returns the ones that are known."""
        with self._lock:
            entries = [self._requests.get(request) for request in requests]
            known = [entry for entry in entries if entry is not None and entry.front_end == front_end]
            for entry in known:
                entry.cancelled = True
            return [entry.id for entry in known]

    def ids(self, request: str | None) -> list[str]:
        """Of what is here: the request of this id and all `id/…`, or every one."""
        with self._lock:
            return [name for name, one in self._requests.items() if is_meant(name, request) and not one.probe]

    def cancel_all(self, requests: Iterable[str]) -> None:
        """Mark them as cancelled, whoever asked for them."""
        with self._lock:
            for request in requests:
                if request in self._requests:
                    self._requests[request].cancelled = True

    def order_abort(self, front_end: str, request: str | None) -> list[Future[int]]:
        """Tell all others that read to end what waits there; each will say how many those were."""
        readers, answers = [], []
        with self._lock:
            for name, home in self._front_ends.items():
                if name == front_end or home.reader is None:
                    continue
                order = AbortOrder(f"abort-{next(self._orders)}", request)
                home.orders.append(order)
                answer = home.unanswered[order.id] = Future()
                answers.append(answer)
                readers.append(home.reader)
        for reader in readers:
            reader.wake()
        return answers

    def aborted(self, front_end: str, order: str, count: int) -> None:
        """Such an answer. One that comes too late is ignored."""
        with self._lock:
            home = self._front_ends.get(front_end)
            answer = home.unanswered.pop(order, None) if home is not None else None
        if answer is not None:
            answer.set_result(count)

    def deliver(self, events: Sequence[TokenEvent]) -> None:
        """Put events where their front ends read them. From the step thread; never waits."""
        readers: dict[str, _Reader] = {}
        with self._lock:
            for event in events:
                entry = self._requests.get(event.request)
                if entry is None:
                    continue
                if event.finish_reason is not None:
                    self._forget(event.request)
                front_end = self._front_ends.get(entry.front_end)
                if front_end is None:
                    continue
                before = front_end.pending.get(event.request)
                front_end.pending[event.request] = event if before is None else merged(before, event)
                if front_end.reader is not None:
                    readers[entry.front_end] = front_end.reader
        for reader in readers.values():
            reader.wake()

    async def stream(self, front_end: str) -> AsyncGenerator[list[TokenEvent | AbortOrder], None]:
        """Batches, until the front end detaches, its lease ends, or another stream of its takes over."""
        reader = _Reader(asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._renew(front_end)
            home = self._front_ends[front_end]
            overtaken, home.reader = home.reader, reader
        if overtaken is not None:
            overtaken.wake()
        while True:
            reader.ready.clear()
            with self._lock:
                here = self._front_ends.get(front_end) is home and home.reader is reader
                batch: list[TokenEvent | AbortOrder] = []
                if here:
                    batch = [*home.pending.values(), *home.orders]
                    home.pending, home.orders = {}, []
            if batch:
                yield batch
            elif here:
                await reader.ready.wait()
            else:
                return

    def detach(self, front_end: str) -> list[str]:
        """Forget a front end; returns its requests, now cancelled."""
        with self._lock:
            gone = self._front_ends.pop(front_end, None)
            mine = [entry for entry in self._requests.values() if entry.front_end == front_end]
            for entry in mine:
                entry.cancelled = True
        if gone is not None:
            for answer in gone.unanswered.values():
                answer.set_result(0)
            if gone.reader is not None:
                gone.reader.wake()
        return [entry.id for entry in mine]

    def expire(self) -> list[str]:
        """Detach every front end whose lease has ended; returns their requests."""
        now = self._clock()
        with self._lock:
            gone = [name for name, front_end in self._front_ends.items() if front_end.lease_ends_at <= now]
        return [request for name in gone for request in self.detach(name)]

    def _forget(self, request: str) -> None:
        gone = self._requests.pop(request, None)
        if gone is not None and not gone.probe:
            self._quiet_since = self._clock()

    def _renew(self, front_end: str) -> None:
        home = self._front_ends.setdefault(front_end, _FrontEnd(0.0))
        home.lease_ends_at = self._clock() + self._lease_s
