"""Ray's head is killed under a real `torpor serve`: all ends with it, and all comes back as it was published (F25)."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from e2e.serving import Server, start_server
from support.kept_rows import keep_row
from support.processes import children_of, has_memory

from torpor.native import Device

MIB = 1 << 20
CAPACITY_BYTES = 128 * MIB
TOY_BYTES = 48 * MIB
ENDED_S, LOST_S, BACK_S = 20.0, 15.0, 60.0
CONFIG = """
models:
- {{name: one, engine: {{kind: 'ranks.toys:make_slow_engine', model: {folder}}}}}
- {{name: two, engine: {{kind: 'ranks.toys:make_slow_engine', model: {folder}}}}}
device: {{kind: host, count: 1, host_capacity: 128MiB, name: {name}}}
host_pool: {{bytes: 64MiB}}
"""


@dataclass
class House:
    """One journal, one device, and the services that lived on them one after the other."""

    folder: Path
    name: str
    servers: list[Server] = field(default_factory=list)

    def serve(self) -> Server:
        file = self.folder / "torpor.yaml"
        file.write_text(CONFIG.format(folder=self.folder, name=self.name))
        paths = os.pathsep.join(filter(None, sys.path))
        self.servers.append(
            start_server(
                self.folder,
                "--config",
                str(file),
                states=("awake", "asleep"),
                variables={"PYTHONPATH": paths},
            )
        )
        return self.servers[-1]

    def free_bytes(self) -> int:
        return Device.host(f"{self.name}-0", CAPACITY_BYTES).memory_info()[0]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path, f"head-{os.getpid()}-{tmp_path.name}")
    yield made
    for server in made.servers:
        server.http.close()
        left = [server.process.pid, *children_of(server.process.pid)]
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
        try:
            server.process.wait(30)
        finally:
            for pid in left:
                if has_memory(pid):
                    os.kill(pid, signal.SIGKILL)


def views(server: Server) -> dict[str, dict[str, object]]:
    return {
        name: dict(server.http.get(f"/models/{name}").raise_for_status().json()) for name in ("one", "two")
    }


def say(server: Server, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "go on", "max_tokens": 3}
    return server.http.post("/v1/completions", json=body)


def until(true: Callable[[], bool], timeout_s: float, what: Callable[[], object]) -> float:
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < timeout_s, what()
        time.sleep(0.1)
    return time.monotonic() - began_s


@pytest.mark.long
@pytest.mark.parametrize(
    "programs",
    [("gcs_server", "raylet/raylet"), ("gcs_server",)],
    ids=["the whole head", "its GCS alone"],
)
def test_what_ended_with_rays_head_comes_back_from_the_journal_as_it_was_published(
    house: House, programs: tuple[str, ...]
) -> None:
    """M6, F25: one model awake, one held asleep; nothing of the dead keeps memory."""
    server = house.serve()
    server.http.post("/sleep", json={"model": "two"}).raise_for_status()
    before = views(server)
    assert house.free_bytes() == CAPACITY_BYTES - TOY_BYTES
    family = children_of(server.process.pid)
    head = [pid for pid, line in family.items() if any(name in line.split(" ")[0] for name in programs)]
    assert len(head) == len(programs), family
    ranks = [rank["pid"] for view in before.values() for rank in view["ranks"]]  # type: ignore[attr-defined]
    with meanwhile(server, "one") as told:
        killed_s = time.monotonic()
        for pid in head:
            os.kill(pid, signal.SIGKILL)
        assert server.process.wait(LOST_S) == 1
        left = time.monotonic() - killed_s
    assert told and all("head" in text and "has died" in text for text in told), told
    assert "Ray's head, which this service had started, has died" in server.log.read_text()
    until(
        lambda: not any(has_memory(pid) for pid in ranks) and house.free_bytes() == CAPACITY_BYTES,
        ENDED_S,
        lambda: (house.free_bytes(), children_of(server.process.pid)),
    )
    ended = time.monotonic() - killed_s
    keep(programs, "all ranks ended, memory free", ended, ENDED_S)
    keep(programs, "service ended by itself, with 1 and the reason", left, LOST_S)
    began_s = time.monotonic()
    again = house.serve()
    back = time.monotonic() - began_s
    after = views(again)
    for name in before:
        for what in ("state", "hold", "parked_tags"):
            assert after[name][what] == before[name][what], name
    assert house.free_bytes() == CAPACITY_BYTES - TOY_BYTES
    assert say(again, "one").json()["choices"][0]["text"] == "xxx"
    assert say(again, "two").status_code == 503, "held asleep"
    again.http.post("/wake", json={"model": "two"}).raise_for_status()
    assert say(again, "two").json()["choices"][0]["text"] == "xxx"
    assert back < BACK_S
    keep(programs, "started again: one awake, one held asleep", back, BACK_S)


@contextmanager
def meanwhile(server: Server, model: str) -> Iterator[list[str]]:
    """A stream that runs, and requests one after the other: what those that did not end well were told (G3)."""
    told: list[str] = []

    def stream() -> None:
        body = {"model": model, "prompt": "go on", "max_tokens": 10_000, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            begun.set()
            told.append([line for line in answer.iter_lines() if line.startswith("data: {")][-1])

    def ask() -> None:
        try:
            while (answer := say(server, model)).status_code == 200:
                pass
            told.append(answer.text)
            assert answer.status_code in (500, 503), answer.text  # it had begun, or had not
        except httpx.ConnectError:
            pass  # it was down already: nothing was begun

    begun = threading.Event()
    asking = [threading.Thread(target=each, daemon=True) for each in (stream, ask, ask, ask)]
    for thread in asking:
        thread.start()
    assert begun.wait(10)
    yield told
    for thread in asking:
        thread.join(10)
        assert not thread.is_alive(), "a request without an end"


def keep(programs: tuple[str, ...], state: str, seconds: float, bound_s: float) -> None:
    row = {"who": f"Ray's head ({', '.join(programs)})", "during": "service", "when": "at rest"}
    row |= {"outcome": state.partition(":")[0], "state": state}
    times = {"state_s": round(seconds, 2), "state_bound_s": bound_s}
    keep_row("kills", ("who", "during", "when", "outcome"), row | times)
