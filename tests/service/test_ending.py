"""The end of a front end in order: seen by probes, clients, followers of events, the journal and the exit code."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_process import running
from service_rig import Rig

from torpor.actors.coordinator.memory import Fault
from torpor.actors.messages import DrainSpec, Kind, OperationRequest
from torpor.actors.ports import ControlUnreachable
from torpor.service.ending import Ending, EndTimes, park
from torpor.service.settings.load import SettingsError, load_settings

ASK = {"model": "chat", "prompt": "x"}
STREAM = ASK | {"stream": True}


def shutdown(**times: Any) -> dict[str, str]:
    return {"TORPOR_SHUTDOWN": json.dumps(times)}


def test_with_notice_it_is_not_ready_and_serves_on_then_ends_with_0(tmp_path: Path) -> None:
    """Whoever sends requests has time to hear of it: none is refused for a closed socket."""
    with running(tmp_path, environment=shutdown(notice_s=5)) as service:
        with httpx.stream("GET", f"{service.url}/events", timeout=10) as events:
            forged = {"X-Forwarded-For": "203.0.113.6"}
            assert httpx.post(f"{service.url}/sleep", headers=forged).status_code == 200
            began = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            told = "".join(events.iter_text())
            assert time.monotonic() - began < 4.5, "told at once, not at the end of the notice"
        assert told.endswith('"This front end ends; go on at another with Last-Event-ID."}\n\n')
        assert told.count("event: ending\n") == 1
        ready = httpx.get(f"{service.url}/readyz")
        assert (ready.status_code, ready.json()) == (503, {"status": "ending"})
        assert httpx.get(f"{service.url}/livez").status_code == 200
        assert httpx.post(f"{service.url}/wake").status_code == 200
        assert httpx.post(f"{service.url}/v1/completions", json=ASK).status_code == 200
        _, err = service.process.communicate(timeout=30)
    assert service.process.returncode == 0, err
    assert 4.9 < time.monotonic() - began < 20
    assert "Traceback" not in err
    # Each answer was given with its operation on the disk: nothing is left to be flushed.
    with closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        assert db.execute("SELECT state FROM operations ORDER BY seq").fetchall() == [("succeeded",)] * 2
        audit = db.execute("SELECT call, address FROM audit ORDER BY seq").fetchall()
    # Nor is anybody believed who says that he is from elsewhere.
    assert audit == [("POST /sleep", "127.0.0.1"), ("POST /wake", "127.0.0.1")]


def test_the_second_signal_does_not_wait_for_streams_and_leaves_no_traceback(tmp_path: Path) -> None:
    with (
        running(tmp_path, "--endless", environment=shutdown(notice_s=60, drain_s=60)) as service,
        httpx.stream("POST", f"{service.url}/v1/completions", json=STREAM, timeout=10) as answer,
    ):
        next(answer.iter_lines())
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        began = time.monotonic()
        code, out, err = service.end(signal.SIGTERM)
    assert time.monotonic() - began < 5
    assert code == 0, err
    assert "requests left: 0" in out
    assert "Traceback" not in err, err


def test_a_signal_while_the_cluster_ends_ends_it_at_once_with_one_line(tmp_path: Path) -> None:
    with running(tmp_path, "--slow-end") as service:
        service.process.send_signal(signal.SIGTERM)
        assert service.process.stdout is not None
        assert service.process.stdout.readline() == "ending\n"
        began = time.monotonic()
        code, _, err = service.end(signal.SIGINT)
    assert (code, time.monotonic() - began < 5) == (1, True)
    assert "interrupted while stopping" in err
    assert "Traceback" not in err


def test_a_front_end_of_a_cluster_parks_its_models_when_it_is_to(tmp_path: Path) -> None:
    with running(tmp_path, "--joins", environment=shutdown(park=True)) as service:
        code, _, err = service.end(signal.SIGTERM)
    assert code == 0, err
    assert "chat: parked" in err
    with closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        ((body, asked),) = db.execute("SELECT body, request FROM operations").fetchall()
    assert (json.loads(body)["kind"], json.loads(body)["state"]) == ("sleep", "succeeded")
    assert json.loads(asked)["wake_on_request"], "it is no hold: the next front end's first request wakes it"


async def test_parking_says_what_it_could_not_do(wide_rig: Rig) -> None:
    said: list[str] = []
    await wide_rig.coordinator.wait((await wide_rig.coordinator.submit(_sleep("draft"))).id)
    wide_rig.rank("chat", 1).fault("preflight", Fault.REFUSE)
    await park(wide_rig.coordinator, 5, said.append)
    assert len(said) == 1 and said[0].startswith("chat: not parked: ")

    class Gone:
        async def models(self) -> None:
            raise ControlUnreachable("no coordinator")

    class Silent:
        async def models(self) -> None:
            await asyncio.Event().wait()

    for control, says in ((Gone(), "no models were parked: no coordinator"), (Silent(), "within 0.05 s")):
        await park(control, 0.05, said.append)  # type: ignore[arg-type]
        assert says in said[-1]


def _sleep(model: str) -> OperationRequest:
    return OperationRequest(Kind.SLEEP, model, drain=DrainSpec())


async def test_without_anything_to_serve_there_is_no_notice() -> None:
    class Server:
        should_exit = force_exit = False

    server, closed = Server(), asyncio.Event()

    async def close() -> None:
        closed.set()

    end = Ending(server, asyncio.Event(), close, EndTimes(notice_s=60, drain_s=0))
    running_end = asyncio.create_task(end.run())
    end.now()
    await asyncio.wait_for(running_end, 5)
    assert server.should_exit and not server.force_exit and closed.is_set()


def test_the_times_of_the_end_are_settings_with_the_defaults_of_the_code() -> None:
    assert EndTimes(**load_settings(None, {}).shutdown.model_dump()) == EndTimes()
    settings = load_settings(None, {"TORPOR_SHUTDOWN__NOTICE_S": "10s", "TORPOR_SHUTDOWN__PARK": "true"})
    assert (settings.shutdown.notice_s, settings.shutdown.park) == (10.0, True)
    for name, wrong in (("NOTICE_S", "-1"), ("DRAIN_S", "soon"), ("PARK_TIMEOUT_S", "0"), ("PARKS", "1")):
        with pytest.raises(SettingsError, match=rf"shutdown\.{name.lower()}: "):
            load_settings(None, {f"TORPOR_SHUTDOWN__{name}": wrong})
