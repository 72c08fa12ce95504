"""Front ends of one running cluster, as real `torpor serve --connect` processes: one is killed, the other goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import ray
from e2e.serving import free_port
from ranks.torpors import MakeTorpor, Torpor
from support.kept_rows import keep_row

from torpor.actors.config import ClusterConfig, EngineConfig, GateConfig
from torpor.actors.messages import Kind, ModelState, OperationRequest, OperationState

LEASE_S = 10
SLOW = EngineConfig(kind="ranks.toys:make_slow_engine")


class FrontEnd:
    """A front end in a process of its own."""

    def __init__(self, torpor: Torpor, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORPOR_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TORPOR_HTTP__PORT": str(self.port),
            "TORPOR_RAY__NAMESPACE": torpor.config.namespace,
        }
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-W", "ignore", "-m", "torpor.service.cli", "serve", "--connect", address]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)

    async def ready(self) -> None:
        async with httpx.AsyncClient() as client, asyncio.timeout(60):
            while True:
                assert self.process.poll() is None, self.log.read_text()
                try:
                    if (await client.get(f"{self.url}/readyz")).status_code == 200:
                        return
                except httpx.TransportError:
                    await asyncio.sleep(0.1)

    async def end(self, number: int) -> int:
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, 30)


@pytest.fixture
def front_ends(tmp_path: Path) -> Iterator[list[FrontEnd]]:
    made: list[FrontEnd] = []
    yield made
    for each in made:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


@dataclass
class Stream:
    """A streamed completion without end: what came of it so far."""

    text: str = ""
    end: str = ""  # a finish reason, or the name of an error

    async def run(self, client: httpx.AsyncClient, front_end: FrontEnd) -> None:
        body = {"model": "toy", "prompt": "go on", "max_tokens": 100_000, "stream": True}
        try:
            async with client.stream("POST", f"{front_end.url}/v1/completions", json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        self.text += choice["text"]
                        self.end = choice["finish_reason"] or ""
        except httpx.TransportError as error:
            self.end = type(error).__name__


@asynccontextmanager
async def streams(front_end: FrontEnd, count: int) -> AsyncIterator[list[Stream]]:
    made = [Stream() for _ in range(count)]
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        tasks = [asyncio.create_task(each.run(client, front_end)) for each in made]
        yield made
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pids(torpor: Torpor) -> list[int]:
    """Of the coordinator and the ranks."""
    return [await torpor.coordinator().pid.remote(), *(rank.pid for rank in (await torpor.view()).ranks)]


@pytest.mark.parametrize("count", [8, pytest.param(32, marks=pytest.mark.long)])
async def test_a_killed_front_end_frees_its_places_and_the_streams_of_another_go_on(
    make_torpor: MakeTorpor, front_ends: list[FrontEnd], tmp_path: Path, count: int
) -> None:
    """G4, M6, F25: the lease of 10 s tells the leader; coordinator and rank are the same processes afterwards."""
    torpor = await make_torpor(engine=SLOW).loaded()
    front_ends += [FrontEnd(torpor, tmp_path / f"front-{number}.log") for number in range(2)]
    await asyncio.gather(*(each.ready() for each in front_ends))
    dies, stays = front_ends
    before = await pids(torpor)
    async with streams(dies, count) as lost, streams(stays, count) as kept:
        await torpor.until(lambda view: view.ranks[0].live_sequences == 2 * count, 20)
        await dies.end(signal.SIGKILL)
        await torpor.until(lambda view: view.ranks[0].live_sequences == count, LEASE_S + 5)
        assert {stream.end for stream in lost} == {"RemoteProtocolError"}
        said = [len(stream.text) for stream in kept]
        await asyncio.sleep(1)
        assert all(len(stream.text) > before for stream, before in zip(kept, said, strict=True))
        assert not any(stream.end for stream in kept)
    await torpor.until(lambda view: view.ranks[0].live_sequences == 0)
    assert await stays.end(signal.SIGTERM) == 0, stays.log.read_text()
    assert "models live on without it" in stays.log.read_text()
    view = await torpor.view()
    assert (view.state, view.gate_open) == (ModelState.AWAKE, True)
    assert await pids(torpor) == before


def queueing(config: ClusterConfig) -> ClusterConfig:
    gate = GateConfig(when_closed="queue")
    return replace(config, models=tuple(replace(model, gate=gate) for model in config.models))


async def complete(client: httpx.AsyncClient, front_end: FrontEnd) -> str:
    """Of the second model, once it is awake: the text."""
    body = {"model": "two", "prompt": "hello", "max_tokens": 3}
    answer = await client.post(f"{front_end.url}/v1/completions", json=body)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


@pytest.mark.long
async def test_a_front_end_killed_with_streams_and_a_queue_leaves_nothing_of_either_behind(
    make_torpor: MakeTorpor, front_ends: list[FrontEnd], tmp_path: Path
) -> None:
    """F25, G3, G4: 32 streams of one model, 16 requests that wait for another; those of a second front end live on."""
    torpor = await make_torpor(engine=SLOW, models=("toy", "two"), adapt=queueing).loaded()
    front_ends += [FrontEnd(torpor, tmp_path / f"queue-{number}.log") for number in range(2)]
    await asyncio.gather(*(each.ready() for each in front_ends))
    dies, stays = front_ends
    before = await pids(torpor)
    slept = await torpor.control.submit(OperationRequest(Kind.SLEEP, "two"))
    assert (await torpor.control.wait(slept.id, 30)).state is OperationState.SUCCEEDED
    limits = httpx.Limits(max_connections=32)
    async with streams(dies, 32) as lost, httpx.AsyncClient(timeout=60, limits=limits) as client:
        await torpor.until(lambda view: view.ranks[0].live_sequences == 32, 20)
        queue = [asyncio.create_task(complete(client, dies)) for _ in range(16)]
        other = [asyncio.create_task(complete(client, stays)) for _ in range(4)]
        await asyncio.sleep(2)
        assert not any(task.done() for task in (*queue, *other)), "they wait"
        await dies.end(signal.SIGKILL)
        began_s = time.monotonic()
        ends = await asyncio.gather(*queue, return_exceptions=True)
        assert all(isinstance(end, httpx.TransportError) for end in ends), ends
        await torpor.until(lambda view: view.ranks[0].live_sequences == 0, LEASE_S + 5)
        seconds = time.monotonic() - began_s
        assert {stream.end for stream in lost} == {"RemoteProtocolError"}
        woken = await torpor.control.submit(OperationRequest(Kind.WAKE, "two"))
        assert (await torpor.control.wait(woken.id, 30)).state is OperationState.SUCCEEDED
        assert await asyncio.gather(*other) == ["xxx"] * 4
    status = (await torpor.control.model("two")).ranks[0]
    assert (status.live_sequences, status.gate_open) == (0, True), "nobody asks for the dead"
    assert await pids(torpor) == before
    row = {"who": "front end, 32 streams, 16 queued", "during": "service", "when": "streams run"}
    row |= {"outcome": "its streams and its queue ended", "state": "awake, all places free"}
    keep_row(
        "kills",
        ("who", "during", "when", "outcome"),
        row | {"state_s": round(seconds, 2), "state_bound_s": LEASE_S + 5},
    )
