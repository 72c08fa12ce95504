"""An abort at the leader reaches those who wait at other front ends, before it is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
from support.leaders import Method

from torpor.actors.messages import AbortOrder, FinishReason, TokenEvent
from torpor.actors.rank import leader as rank_leader
from torpor.actors.rank.front_ends import FrontEnds
from torpor.actors.rank.gate import Gate
from torpor.actors.rank.leader import Leader
from torpor.actors.ray.inference import RayInference


class Handle:
    """As an actor's, of a leader in this process."""

    def __init__(self) -> None:
        self.leader = Leader(Gate(time.monotonic, 8), FrontEnds(time.monotonic))
        for name in ("submit", "cancel", "abort_requests", "aborted", "renew", "detach"):
            setattr(self, name, Method(self._eager(name)))
        self.stream = Method(self._stream)

    def _eager(self, name: str) -> Any:
        return lambda *given: asyncio.ensure_future(getattr(self.leader, name)(*given))

    async def _stream(self, front_end: str) -> AsyncIterator[Awaitable[list[TokenEvent | AbortOrder]]]:
        async for batch in self.leader.stream(front_end):
            answer = asyncio.get_running_loop().create_future()
            answer.set_result(batch)
            yield answer


class Door:
    """A front end at which so many wait."""

    def __init__(self, handle: Handle, count: int) -> None:
        self.inference = RayInference("here", None, lambda model: handle)  # type: ignore[arg-type,return-value]
        self.count = count
        self.heard: list[tuple[str, str | None]] = []
        self.inference.on_abort(self._end)

    def _end(self, model: str, request: str | None) -> int:
        self.heard.append((model, request))
        return self.count

    async def connect(self) -> None:
        await self.inference.abort_requests("chat", "nobody's")
        for _ in range(20):
            await asyncio.sleep(0)
        self.heard.clear()


@pytest.fixture
async def doors() -> AsyncIterator[tuple[Door, Door, Door]]:
    handle = Handle()
    made = Door(handle, 1), Door(handle, 2), Door(handle, 4)
    for door in made:
        await door.connect()
    for door in made:
        door.heard.clear()
    yield made
    await asyncio.gather(*(door.inference.close() for door in made))


async def test_all_other_front_ends_hear_of_it_and_their_requests_are_counted(
    doors: tuple[Door, Door, Door],
) -> None:
    first, second, third = doors
    assert await first.inference.abort_requests("chat", "mine") == 6
    assert await third.inference.abort_requests("chat", None) == 3
    assert first.heard == [("chat", None)]
    assert second.heard == [("chat", "mine"), ("chat", None)]
    assert third.heard == [("chat", "mine")]


async def test_a_front_end_that_has_died_or_left_delays_an_abort_by_a_bounded_time(
    doors: tuple[Door, Door, Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = doors
    monkeypatch.setattr(rank_leader, "ORDER_S", 0.1)
    second.inference.on_abort(_break)
    assert await asyncio.wait_for(first.inference.abort_requests("chat", None), 2) == 4
    await third.inference.close()
    assert await asyncio.wait_for(first.inference.abort_requests("chat", None), 2) == 0


def _break(model: str, request: str | None) -> int:
    raise RuntimeError("it died")


async def test_an_order_comes_after_the_events_that_were_before_it_and_a_late_answer_is_ignored() -> None:
    front_ends = FrontEnds(time.monotonic)
    front_ends.add("one", "a")
    stream = front_ends.stream("one")
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    front_ends.deliver([TokenEvent("a", "so far", finish_reason=FinishReason.STOP)])
    (answer,) = front_ends.order_abort("two", None)
    event, order = await reading
    assert isinstance(event, TokenEvent) and isinstance(order, AbortOrder)
    assert order.request is None
    front_ends.aborted("one", order.id, 3)
    front_ends.aborted("one", order.id, 4)
    front_ends.aborted("nobody", order.id, 5)
    assert answer.result(0) == 3
    await stream.aclose()
