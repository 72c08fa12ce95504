"""A client with the service in its own process: whole calls, streams as they come, and callers that leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from service_inside import URL, Inside, inside

from torpor.service import NotFound


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path) as made:
        yield made


def test_all_that_goes_over_http_goes_within_a_process(house: Inside) -> None:
    with house.client() as client:
        assert client.chat("chat", "Capital of France?").text == "Paris."
        with client.asleep("chat") as freed:
            assert sum(freed.bytes.values()) == 150 << 20
            assert client.model("chat")["state"] == "asleep"
        assert client.model("chat")["state"] == "awake"
        with pytest.raises(NotFound, match="no model 'nobody'"):
            client.wake("nobody")
        assert [entry["address"] for entry in client.audit(1)] == ["test"]


def test_events_come_while_they_happen_and_end_with_their_reader(house: Inside) -> None:
    with house.client() as client:
        events = client.events()
        first: list[str] = []
        reader = threading.Thread(target=lambda: first.append(next(events).kind))
        reader.start()
        while not house.readers():
            time.sleep(0.01)
        client.sleep()
        reader.join(5)
        assert first, "it was to come before the stream ended"
        events.close()  # type: ignore[attr-defined]
        for _ in range(500):
            if not house.readers():
                return
            time.sleep(0.01)
        pytest.fail("the service still reads events for somebody who has left")


def test_an_answer_that_does_not_come_in_time_is_told_as_that(house: Inside) -> None:
    house.transport.serve(_silent)
    with httpx.Client(transport=house.lent(), base_url=URL) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.get("/livez", timeout=0.05)
        house.transport.serve(_ends_at_once)
        with pytest.raises(httpx.RemoteProtocolError):
            http.get("/livez")


async def _silent(scope: object, receive: object, send: object) -> None:
    await receive()  # type: ignore[operator]
    await receive()  # type: ignore[operator]


async def _ends_at_once(scope: object, receive: object, send: object) -> None:
    raise ValueError("no answer")
