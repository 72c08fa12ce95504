"""Work for a client that may leave: who is interrupted, and what is told of it."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message

from torpor.service.sse import ClientGone, while_connected


class Line:
    """A client's connection, until it is cut."""

    def __init__(self) -> None:
        self.cut = asyncio.Event()

    async def receive(self) -> Message:
        await self.cut.wait()
        return {"type": "http.disconnect"}

    def request(self) -> Request:
        return Request({"type": "http", "method": "POST", "headers": []}, self.receive)


async def test_work_for_a_client_that_stays_is_answered_and_nothing_goes_on() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    before = asyncio.all_tasks()
    assert await while_connected(Line().request(), work()) == 7
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_work_for_a_client_that_leaves_is_ended_and_its_task_can_go_on() -> None:
    line, cleared = Line(), []

    async def work() -> None:
        try:
            line.cut.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleared.append(True)

    with pytest.raises(ClientGone):
        await while_connected(line.request(), work())
    assert cleared == [True]
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    await asyncio.sleep(0)  # not interrupted once more


async def test_an_error_of_the_work_is_told_also_when_the_client_left_meanwhile() -> None:
    line = Line()

    async def work() -> None:
        try:
            line.cut.set()
            await asyncio.sleep(60)
        finally:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        await while_connected(line.request(), work())
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


@pytest.mark.parametrize("client_leaves", [False, True])
async def test_who_is_cancelled_from_outside_stays_cancelled(client_leaves: bool) -> None:
    line, begun = Line(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.sleep(60)

    async def served() -> None:
        await while_connected(line.request(), work())

    task = asyncio.create_task(served())
    await begun.wait()
    if client_leaves:
        line.cut.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
