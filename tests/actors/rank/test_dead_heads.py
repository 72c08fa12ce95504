"""Ray's head is dead, and whoever asks it for an actor by name is blocked: nobody else may be (G3, M6)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from torpor.actors.messages import GenerateRequest
from torpor.actors.ports import ControlUnreachable, GateClosed, LeaderLost
from torpor.actors.ray import lookup
from torpor.actors.ray.inference import RayInference
from torpor.actors.ray.names import COORDINATOR
from torpor.actors.ray.ports import RayControl

ANSWER_S = 0.2


class Head:
    """`find` blocks, as `ray.get_actor` does for a minute, until the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.asked = 0

    def find(self, name: str) -> object:
        self.asked += 1
        self.over.wait(20)
        raise ValueError(f"no actor has the name {name}")


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    monkeypatch.setattr(lookup, "ANSWER_S", ANSWER_S)
    made = Head()
    yield made
    made.over.set()


async def longest_stall_s() -> float:
    """Of the event loop, until this is cancelled."""
    longest_s = 0.0
    try:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, time.monotonic() - began_s)
    except asyncio.CancelledError:
        return longest_s


async def test_requests_that_meet_a_dead_head_end_in_time_and_block_nobody(head: Head) -> None:
    inference = RayInference("here", None, head.find)  # type: ignore[arg-type]
    watching = asyncio.create_task(longest_stall_s())
    await asyncio.sleep(0)
    asking = [anext(inference.generate("chat", GenerateRequest(str(at), "Hi"))) for at in range(20)]
    began_s = time.monotonic()
    ends = await asyncio.gather(*asking, return_exceptions=True)
    took_s = time.monotonic() - began_s
    watching.cancel()
    assert all(isinstance(end, LeaderLost) and "head has not answered" in str(end) for end in ends), ends
    assert took_s < 5 and await watching < 2
    assert head.asked == 1, "one thread waits for all"


async def test_requests_that_wait_for_a_head_that_is_found_dead_are_told_why_at_once(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "ANSWER_S", 30.0)
    inference = RayInference("here", None, head.find)  # type: ignore[arg-type]
    asking = asyncio.ensure_future(anext(inference.generate("chat", GenerateRequest("a", "Hi"))))
    await asyncio.sleep(0.05)
    await inference.close("Ray's head has died")
    for request in (asking, anext(inference.generate("chat", GenerateRequest("b", "Hi")))):
        with pytest.raises(GateClosed, match="Ray's head has died"):
            await asyncio.wait_for(request, 2)


async def test_calls_of_the_coordinator_end_in_time_and_with_the_reason_once_it_is_known(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = RayControl("here", head.find)  # type: ignore[arg-type]
    with pytest.raises(ControlUnreachable, match="head has not answered"):
        await asyncio.wait_for(control.models(), 5)
    assert not await control.head_answers()
    monkeypatch.setattr(lookup, "ANSWER_S", 30.0)
    asking = asyncio.ensure_future(control.models())
    await asyncio.sleep(0.05)
    control.give_up("Ray's head has died")
    for request in (asking, asyncio.ensure_future(control.models())):
        with pytest.raises(ControlUnreachable, match="Ray's head has died"):
            await asyncio.wait_for(request, 2)


async def test_leaders_are_connected_to_before_somebody_asks_and_one_that_is_not_there_harms_nobody() -> None:
    """While the head is away nobody can be found."""
    asked: list[str] = []

    def find(model: str) -> object:
        asked.append(model)
        if model == "gone":
            raise OSError("no answer")
        return model  # its calls fail: only who is connected to is looked at

    inference = RayInference("here", None, find)  # type: ignore[arg-type]
    await inference.meet(["gone", "chat", "code"])
    assert sorted(asked) == ["chat", "code", "gone"]
    assert sorted(str(each._handle) for each in inference.connections()) == ["chat", "code"]
    await inference.close()


async def test_what_ray_remembers_of_the_coordinator_is_no_answer_of_its_head(head: Head) -> None:
    """Ray tells of an actor that it has found before without asking anybody."""

    def find(name: str) -> object:
        return object() if name == COORDINATOR else head.find(name)

    control = RayControl("here", find)  # type: ignore[arg-type]
    assert not await control.head_answers()
    head.over.set()
    await asyncio.sleep(0.1)
    assert await control.head_answers()


async def test_a_head_that_knows_no_coordinator_answers_all_the_same(head: Head) -> None:
    head.over.set()
    control = RayControl("here", head.find)  # type: ignore[arg-type]
    assert await control.head_answers()
    with pytest.raises(ControlUnreachable, match="no coordinator in the namespace 'here'"):
        await control.models()
