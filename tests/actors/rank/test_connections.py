"""A front end's connection to a leader, over a handle that misbehaves as a broken link to Ray would (G3)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from ray.exceptions import RaySystemError
from support.leaders import Leader, Method

from torpor.actors.messages import FinishReason, GenerateRequest, TokenEvent
from torpor.actors.ports import GateClosed, LeaderLost
from torpor.actors.ray import inference as connection
from torpor.actors.ray.inference import RayInference


@pytest.fixture
def leader() -> Leader:
    return Leader()


@pytest.fixture
async def inference(leader: Leader) -> AsyncIterator[RayInference]:
    made = RayInference("here", None, lambda model: leader)  # type: ignore[arg-type,return-value]
    yield made
    await made.close()


async def begin(inference: RayInference, leader: Leader, text: str = "") -> asyncio.Task[list[TokenEvent]]:
    """A request that was admitted, and has read this."""

    async def read() -> list[TokenEvent]:
        return [event async for event in inference.generate("chat", GenerateRequest("a", "Hi"))]

    task = asyncio.create_task(read())
    for _ in range(100):
        await asyncio.sleep(0)
    if text:
        leader.say(text)
        for _ in range(100):
            await asyncio.sleep(0)
    return task


BREAKS = [
    RaySystemError("the connection is broken"),
    ConnectionResetError("by peer"),
    KeyError("a fault of Ray's"),
]


@pytest.mark.parametrize("error", BREAKS, ids=lambda error: type(error).__name__)
async def test_a_started_stream_whose_connection_breaks_ends_with_an_error_event(
    inference: RayInference, leader: Leader, error: Exception
) -> None:
    """Whatever the stream raises: nobody waits for events that will not come."""
    running = await begin(inference, leader, "Par")
    leader.events.put_nowait(error)
    events = await asyncio.wait_for(running, 2)
    assert [event.text for event in events] == ["Par", ""]
    assert events[-1].finish_reason is FinishReason.ERROR and events[-1].error


@pytest.mark.parametrize("error", BREAKS, ids=lambda error: type(error).__name__)
async def test_an_unstarted_request_whose_connection_breaks_may_be_submitted_again(
    inference: RayInference, leader: Leader, error: Exception
) -> None:
    running = await begin(inference, leader)
    assert leader.submitted == ["a"]
    leader.events.put_nowait(error)
    with pytest.raises(LeaderLost) as lost:
        await asyncio.wait_for(running, 2)
    assert lost.value.admitted
    assert leader.cancelled == ["a"], "it may be running all the same"
    again = await begin(inference, leader)
    leader.say("Paris.", FinishReason.STOP)
    assert [event.text for event in await asyncio.wait_for(again, 2)] == ["Paris."]


async def test_a_submission_that_is_not_answered_ends_with_the_connection(
    inference: RayInference, leader: Leader
) -> None:
    leader.silent = True
    running = await begin(inference, leader)
    leader.events.put_nowait(RaySystemError("the connection is broken"))
    with pytest.raises(LeaderLost) as lost:
        await asyncio.wait_for(running, 2)
    assert not lost.value.admitted


async def test_a_submission_that_cannot_be_sent_may_be_repeated(
    inference: RayInference, leader: Leader
) -> None:
    await begin(inference, leader, "Par")
    leader.broken = RaySystemError("the connection is broken")
    with pytest.raises(LeaderLost, match="connection is broken"):
        await anext(inference.generate("chat", GenerateRequest("b", "Hi")))


async def test_one_that_was_let_in_and_says_nothing_is_told_of_and_may_still_be_submitted_again(
    inference: RayInference, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G2, G3: e.g. frozen before its first token."""
    monkeypatch.setattr(connection, "SILENT_S", 0.01)
    events = inference.generate("chat", GenerateRequest("a", "Hi"))
    assert (await asyncio.wait_for(anext(events), 2)).silent
    leader.events.put_nowait(RaySystemError("the connection is broken"))
    with pytest.raises(LeaderLost):
        while (await asyncio.wait_for(anext(events), 2)).silent:
            pass


async def test_a_leader_that_answers_no_renewal_is_given_up(
    inference: RayInference, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream says nothing either: only the silence tells."""
    monkeypatch.setattr(connection, "LEASE_S", 0.1)
    monkeypatch.setattr(connection, "RENEW_S", 0.05)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    leader.renew = Method(never)
    running = await begin(inference, leader, "Par")
    events = await asyncio.wait_for(running, 2)
    assert "did not answer" in events[-1].error


async def test_a_renewal_that_raises_whatever_ends_the_connection(
    inference: RayInference, leader: Leader
) -> None:
    async def broken(*_: object) -> None:
        raise KeyError("a fault of Ray's")

    leader.renew = Method(broken)
    with pytest.raises(LeaderLost):
        await asyncio.wait_for(await begin(inference, leader), 2)


async def test_a_front_end_that_ends_offers_nothing_to_be_repeated_here(
    inference: RayInference, leader: Leader
) -> None:
    running = await begin(inference, leader)
    await inference.close()
    for ended in (
        running,
        asyncio.ensure_future(anext(inference.generate("chat", GenerateRequest("b", "Hi")))),
    ):
        with pytest.raises(GateClosed, match="this front end is ending") as closed:
            await asyncio.wait_for(ended, 2)
        assert not isinstance(closed.value, LeaderLost)
