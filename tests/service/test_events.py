"""GET /events on a real server: what happens is told as it happens, and again to whoever comes back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from service_process import ServiceProcess, running

from torpor.service import BadRequest, Client
from torpor.service.client.events import Event, EventReader


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running(tmp_path_factory.mktemp("events")) as process:
        yield process


def cycle(client: Client) -> None:
    assert client.sleep("chat")["state"] == "succeeded"
    assert client.wake("chat")["state"] == "succeeded"


def until_awake(client: Client, last_event_id: str) -> list[Event]:
    events = []
    for event in client.events(last_event_id=last_event_id):
        events.append(event)
        done = (
            event.kind == "operation" and event.data["kind"] == "wake" and event.data["state"] == "succeeded"
        )
        if done:
            break
    return events


def first_id(service: ServiceProcess) -> str:
    """Where one is who comes now; it is no event."""
    with httpx.stream("GET", f"{service.url}/events", timeout=10) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        reader = EventReader()
        for line in response.iter_lines():
            assert reader.feed(line) is None
            if reader.last_id:
                return reader.last_id
    raise AssertionError("no id")


def test_who_comes_back_hears_everything_once_from_where_it_left_off(service: ServiceProcess) -> None:
    with Client(service.url, timeout_s=20) as client:
        start = first_id(service)
        cycle(client)
        events = until_awake(client, start)
        states = [event.data["state"] for event in events if event.kind == "model"]
        assert {"sleeping", "asleep", "waking"} <= {*states}
        gates = [event.data["gate"]["reason"] for event in events if event.kind == "model"]
        assert "asleep" in gates
        assert len({event.id for event in events}) == len(events)
        later = until_awake(client, events[3].id)
        assert [event.id for event in later] == [event.id for event in events[4:]]


def test_an_id_that_is_too_old_gets_a_reset_and_one_that_is_none_is_refused(service: ServiceProcess) -> None:
    with Client(service.url, timeout_s=20) as client:
        event = next(client.events(last_event_id="0:1"))
        assert event.kind == "reset" and "read /models" in event.data["hint"]
        with pytest.raises(BadRequest, match="is no event id"):
            next(client.events(last_event_id="yesterday"))


def test_one_model_s_events_can_be_followed_alone(service: ServiceProcess) -> None:
    start = first_id(service)
    with Client(service.url, timeout_s=20) as client:
        cycle(client)
    with httpx.stream(
        "GET",
        f"{service.url}/events",
        params={"model": "other"},
        headers={"Last-Event-ID": start},
        timeout=10,
    ) as response:
        reader = EventReader()
        for line in response.iter_lines():
            assert reader.feed(line) is None, "an event of another model"
            if reader.last_id not in ("", start):
                break


def hear_interrupts() -> None:
    """In a child that begins: a shell's background jobs, a run of tests too, ignore them, and so would it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_command_line_follows_what_happens(service: ServiceProcess) -> None:
    start = first_id(service)
    command = [sys.executable, "-m", "torpor.service.cli", "events", "--url", service.url, "--since", start]
    lines: list[str] = []
    with subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, text=True, preexec_fn=hear_interrupts
    ) as follower:
        assert follower.stdout is not None
        with Client(service.url, timeout_s=20) as client:
            cycle(client)
        for line in follower.stdout:
            lines.append(line)
            event = json.loads(line)
            if event["kind"] == "operation" and event["data"]["kind"] == "wake":
                break
        follower.send_signal(signal.SIGINT)
        try:
            follower.wait(15)
        finally:
            follower.kill()
    assert json.loads(lines[0])["kind"] in ("model", "operation")


def test_a_service_that_ends_does_not_wait_for_those_who_follow(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        ended = threading.Event()

        def follow() -> None:
            with Client(service.url, timeout_s=20) as client:
                for _ in client.events():
                    pass
            ended.set()

        threading.Thread(target=follow, daemon=True).start()
        time.sleep(0.5)
        began_s = time.monotonic()
        code, _, _ = service.end(signal.SIGTERM)
        assert code == 0 and time.monotonic() - began_s < 4.0
        assert ended.wait(5)
