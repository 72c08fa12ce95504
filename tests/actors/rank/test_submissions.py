"""Requests that come together share a call to the leader, in order, and each gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from torpor.actors.messages import Admission, AdmissionReply, GenerateRequest
from torpor.actors.ray.submissions import MAX_CALLS, MAX_TOGETHER, Submissions


class Calls:
    """What was sent, call by call. They are answered once `open` is set."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.open = asyncio.Event()
        self.error: Exception | None = None

    def requests(self) -> list[str]:
        return [request for call in self.sent for request in call]

    async def send(self, requests: Sequence[GenerateRequest]) -> list[AdmissionReply]:
        self.sent.append([request.id for request in requests])
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return [AdmissionReply(request.id, Admission.ADMITTED) for request in requests]


def ask(submissions: Submissions, count: int) -> list[asyncio.Task[AdmissionReply]]:
    return [asyncio.create_task(submissions.submit(GenerateRequest(str(at), "Hi"))) for at in range(count)]


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_those_that_come_together_share_calls_in_order_and_get_their_own_answers() -> None:
    calls = Calls()
    asking = ask(Submissions(calls.send), MAX_TOGETHER + 3)
    await turns()
    assert [len(sent) for sent in calls.sent] == [MAX_TOGETHER, 3]
    assert calls.requests() == [str(at) for at in range(MAX_TOGETHER + 3)]
    calls.open.set()
    assert [reply.request for reply in await asyncio.gather(*asking)] == calls.requests()


async def test_no_more_calls_are_under_way_than_may_be_and_the_rest_follows() -> None:
    calls = Calls()
    submissions = Submissions(calls.send)
    asking = []
    for _ in range(MAX_CALLS + 5):
        asking += ask(submissions, 1)
        await turns()
    assert len(calls.sent) == MAX_CALLS
    calls.open.set()
    await asyncio.wait_for(asyncio.gather(*asking), 2)
    assert sorted(map(len, calls.sent)) == [1] * MAX_CALLS + [5]


async def test_one_whose_client_has_gone_before_it_was_sent_is_not_sent() -> None:
    calls = Calls()
    submissions = Submissions(calls.send)
    asking = ask(submissions, MAX_CALLS)
    for _ in range(MAX_CALLS):
        await asyncio.sleep(0)
    first = len(calls.requests())
    gone, kept = ask(submissions, 2)
    await asyncio.sleep(0)
    gone.cancel()
    calls.open.set()
    await asyncio.wait_for(asyncio.gather(*asking, kept), 2)
    assert len(calls.requests()) == first + 1 and gone.cancelled()


@pytest.mark.parametrize("how", ["the call fails", "the connection ends"])
async def test_an_error_is_everybodys(how: str) -> None:
    calls = Calls()
    submissions = Submissions(calls.send)
    asking = ask(submissions, MAX_TOGETHER * (MAX_CALLS + 1))  # some are under way, some are not
    await turns()
    if how == "the call fails":
        calls.error = ConnectionResetError("by peer")
        calls.open.set()
    else:
        submissions.end(ConnectionResetError("by peer"))
        asking += ask(submissions, 1)
    ends = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 2)
    assert all(isinstance(end, ConnectionResetError) for end in ends)
