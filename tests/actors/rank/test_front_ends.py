"""Streams of events to front ends: order, merging, leases."""

from __future__ import annotations

import asyncio
import threading

import pytest

from torpor.actors.messages import FinishReason, TokenEvent, TokenLogprob
from torpor.actors.rank.front_ends import DuplicateRequest, FrontEnds


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def front_ends(clock: Clock) -> FrontEnds:
    return FrontEnds(clock, lease_s=10)


def test_idle_is_the_time_since_the_last_request_came_or_ended(front_ends: FrontEnds, clock: Clock) -> None:
    """G6: what idle sleeps are decided by; a look, a lease or a stream is no request."""
    clock.now = 3
    front_ends.renew("one")
    assert front_ends.idle_s() == 3
    front_ends.add("one", "a")
    front_ends.add("one", "b")
    clock.now = 50
    assert front_ends.idle_s() == 0
    front_ends.remove("a")
    clock.now = 60
    assert front_ends.idle_s() == 0
    front_ends.deliver([TokenEvent("b", finish_reason=FinishReason.LENGTH)])
    front_ends.remove("b")
    clock.now = 67
    front_ends.deliver([TokenEvent("b", "late")])
    assert front_ends.idle_s() == 7


def test_a_probe_keeps_no_model_from_being_idle_and_is_no_request_to_abort(
    front_ends: FrontEnds, clock: Clock
) -> None:
    """G6."""
    clock.now = 5
    front_ends.add("one", "probe-1", probe=True)
    assert front_ends.idle_s() == 5
    front_ends.add("one", "a")
    assert (front_ends.idle_s(), front_ends.ids(None)) == (0, ["a"])
    front_ends.remove("a")
    clock.now = 9
    front_ends.deliver([TokenEvent("probe-1", finish_reason=FinishReason.LENGTH)])
    assert front_ends.idle_s() == 4


async def test_events_from_another_thread_reach_the_front_end_that_asked(front_ends: FrontEnds) -> None:
    front_ends.add("one", "a")
    front_ends.add("two", "b")

    def step_thread() -> None:
        for i in range(200):
            end = FinishReason.LENGTH if i == 199 else None
            front_ends.deliver(
                [TokenEvent("a", f"{i},", finish_reason=end), TokenEvent("b", "-", finish_reason=end)]
            )

    thread = threading.Thread(target=step_thread)
    thread.start()
    text = ""
    async with asyncio.timeout(10):
        async for batch in front_ends.stream("one"):
            assert {event.request for event in batch} == {"a"}
            text += "".join(event.text for event in batch)
            if batch[-1].finish_reason is not None:
                break
    thread.join()
    assert text == "".join(f"{i}," for i in range(200))


async def test_what_a_slow_reader_missed_is_merged_and_nothing_is_lost(front_ends: FrontEnds) -> None:
    front_ends.add("one", "a")
    for i in range(1000):
        front_ends.deliver([TokenEvent("a", "x", (i,), logprobs=(TokenLogprob(i, "x", -i),))])
    front_ends.deliver([TokenEvent("a", "!", (), FinishReason.STOP, completion_tokens=1000)])
    batch = await anext(front_ends.stream("one"))
    assert len(batch) == 1, "what waits is bounded by requests, not by steps"
    assert batch[0].text == "x" * 1000 + "!"
    assert batch[0].token_ids == tuple(range(1000))
    assert [one.logprob for one in batch[0].logprobs] == [-i for i in range(1000)]
    assert batch[0].finish_reason is FinishReason.STOP
    assert batch[0].completion_tokens == 1000


async def test_a_front_end_whose_lease_ends_loses_its_requests_and_its_stream(
    front_ends: FrontEnds, clock: Clock
) -> None:
    """G4."""
    front_ends.add("dead", "a")
    front_ends.add("alive", "b")
    stream = front_ends.stream("dead")
    reading = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)
    clock.now = 9.0
    front_ends.renew("alive")
    assert front_ends.expire() == []
    clock.now = 10.0
    assert front_ends.expire() == ["a"]
    assert await asyncio.wait_for(reading, 5) is None
    clock.now = 19.0
    assert front_ends.expire() == ["b"]


async def test_a_second_stream_takes_over_from_the_first(front_ends: FrontEnds) -> None:
    front_ends.add("one", "a")
    first = asyncio.create_task(anext(front_ends.stream("one"), None))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(anext(front_ends.stream("one")))
    assert await asyncio.wait_for(first, 5) is None
    front_ends.deliver([TokenEvent("a", "x")])
    assert (await asyncio.wait_for(second, 5))[0].text == "x"


def test_two_requests_with_one_id_cannot_run_at_once(front_ends: FrontEnds) -> None:
    front_ends.add("one", "a")
    with pytest.raises(DuplicateRequest):
        front_ends.add("two", "a")
    front_ends.deliver([TokenEvent("a", finish_reason=FinishReason.STOP)])
    front_ends.add("two", "a")


def test_a_front_end_cancels_its_own_requests_only(front_ends: FrontEnds) -> None:
    mine = front_ends.add("one", "a")
    other = front_ends.add("two", "b")
    assert front_ends.cancel("one", ["a", "b", "c"]) == ["a"]
    assert mine.cancelled and not other.cancelled
