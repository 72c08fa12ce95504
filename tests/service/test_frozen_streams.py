"""HTTP streams that are silent, and generations frozen over a sleep as their clients see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from service_engine_rig import real_rig
from service_rig import Rig, app_over, client_of, config_of
from support.leaders import Leader

from torpor.actors.messages import FinishReason
from torpor.actors.ray import inference as connection
from torpor.actors.ray.inference import RayInference
from torpor.service.sse import SSE_KEEP_ALIVE, EventStream

HELLO = {"model": "chat", "messages": [{"role": "user", "content": "Capital of France?"}], "stream": True}
KEEP_ALIVE = ": keep-alive"


def hurry(app: FastAPI, keep_alive_s: float) -> None:
    app.state.context = replace(app.state.context, keep_alive_s=keep_alive_s)


def frames(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [frame for frame in answer.text.split("\n\n") if frame]


def data(answer: httpx.Response) -> list[Any]:
    """Of its events, comments left out, as clients do."""
    lines = [line.removeprefix("data: ") for line in frames(answer) if not line.startswith(":")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_stream_that_is_silent_gets_comments_and_one_that_speaks_gets_none(rig: Rig) -> None:
    """G2."""
    hurry(rig.app, 0.05)
    swift = await rig.http.post("/v1/chat/completions", json=HELLO)
    assert KEEP_ALIVE not in frames(swift)
    rig.inference.delay_s = 0.18
    slow = await rig.http.post("/v1/chat/completions", json=HELLO)
    assert frames(slow).count(KEEP_ALIVE) >= 3
    assert [c["choices"] for c in data(slow)] == [c["choices"] for c in data(swift)]


async def test_a_stream_that_ends_in_an_error_while_it_is_kept_alive_says_so(rig: Rig) -> None:
    hurry(rig.app, 0.02)
    rig.inference.delay_s, rig.inference.fail_after = 0.1, 1
    answer = await rig.http.post("/v1/chat/completions", json=HELLO)
    assert KEEP_ALIVE in frames(answer)
    assert data(answer)[-1]["error"]["code"] == "generation_failed"


@asynccontextmanager
async def spoken_for(rig: Rig) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient, Leader]]:
    """The front door with its real connection to a leader that the test speaks for."""
    leader = Leader()
    inference = RayInference("here", rig.coordinator, lambda model: leader)  # type: ignore[arg-type,return-value]
    app = app_over(rig.coordinator, inference, config_of({"chat": 1}, Path()), StringIO())
    hurry(app, 0.02)
    async with client_of(app) as http:
        yield app, http, leader
    await app.state.context.inference.close()


@pytest.mark.parametrize("end", ["it goes on", "its leader is lost", "its leader is lost twice"])
async def test_a_stream_that_is_frozen_before_its_first_token_gets_comments_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """G2, G3: it is kept until its first token all the same, and does not end in silence."""
    monkeypatch.setattr(connection, "SILENT_S", 0.02)
    async with spoken_for(rig) as (_, http, leader):
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=HELLO))
        for lost in range(end.count("lost") + end.count("twice")):
            await until(lambda so_far=lost: len(leader.submitted) > so_far)
            await asyncio.sleep(0.1)
            leader.events.put_nowait(ConnectionResetError("by peer"))
        if "twice" not in end:
            await until(lambda: len(leader.submitted) == 1 + end.count("lost"))
            await asyncio.sleep(0.1)
            leader.say("Paris.", FinishReason.STOP)
        answer = await asyncio.wait_for(asking, 10)
    assert frames(answer).count(KEEP_ALIVE) >= 2
    last = data(answer)[-1]
    if "twice" in end:
        assert "leader is gone" in last["error"]["message"]
    else:
        assert last["choices"][0]["delta"]["content"] == "Paris."


async def until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within 5 s")


async def test_a_client_that_leaves_while_its_stream_is_kept_alive_is_let_go() -> None:
    """G4: also one that had stopped reading before, so that a comment was on its way."""
    closed, sent = asyncio.Event(), asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()

    async def close() -> None:
        closed.set()

    async def send(message: dict[str, Any]) -> None:
        if message.get("body") == SSE_KEEP_ALIVE:
            sent.set()
            await asyncio.Event().wait()

    async def receive() -> dict[str, str]:
        await sent.wait()
        return {"type": "http.disconnect"}

    stream = EventStream(chunks(), close, {}, 0.02)
    await asyncio.wait_for(stream({}, receive, send), 5)  # type: ignore[arg-type]
    assert closed.is_set()


@pytest.mark.parametrize("mode", ["none", "pinned"])
async def test_a_stream_frozen_over_a_sleep_is_kept_alive_and_says_the_same_words(
    tmp_path: Path, mode: str
) -> None:
    """G2, C6: through HTTP, coordinator, gate and engine."""
    async with real_rig(tmp_path) as (app, http, rank):
        hurry(app, 0.05)
        wanted = {"model": "chat", "prompt": "Paris is", "max_tokens": 200, "temperature": 0.9, "seed": 7}
        wanted |= {"stream": True, "return_token_ids": True}
        undisturbed = await http.post("/v1/completions", json=wanted)
        asking = asyncio.create_task(http.post("/v1/completions", json=wanted | {"cache_salt": mode}))
        assert rank.core._leader is not None
        gate = rank.core._leader.gate
        await rank.until(lambda: rank.stats()["locked_pages"] > 2)
        answer = await http.post("/sleep", json={"drain": {"mode": "freeze"}, "restore": {"kv_cache": mode}})
        assert (answer.status_code, answer.json()["state"]) == (200, "succeeded"), answer.text
        assert answer.json()["aborted_requests"] == 0
        (shown,) = (await http.get("/models/chat")).json()["ranks"]
        assert (shown["live_sequences"], shown["frozen_requests"]) == (1, 1)
        idle = {"drain": {"mode": "if_idle"}, "tags": ["kv_cache"], "restore": {"kv_cache": "none"}}
        again = await http.post("/sleep", json=idle)
        assert again.status_code == (409 if mode == "pinned" else 200), "a repetition changes nothing"
        await asyncio.sleep(0.3)
        assert not asking.done() and gate.frozen == 1
        assert (await http.post("/wake")).status_code == 200
        frozen = await asyncio.wait_for(asking, 60)
        assert frames(frozen).count(KEEP_ALIVE) >= 3
        assert tokens(frozen) == tokens(undisturbed)
        assert len(tokens(frozen)) == 200


def tokens(answer: httpx.Response) -> list[int]:
    return [token for event in data(answer) for token in event["choices"][0].get("token_ids", [])]


async def test_a_freeze_with_a_limit_ends_its_streams_with_abort(tmp_path: Path) -> None:
    async with real_rig(tmp_path) as (_, http, rank):
        wanted = {"model": "chat", "prompt": "Paris is", "max_tokens": 400, "stream": True}
        asking = asyncio.create_task(http.post("/v1/completions", json=wanted))
        await rank.until(lambda: rank.stats()["locked_pages"] > 2)
        drain = {"mode": "freeze", "freeze_timeout_s": 0.2}
        assert (await http.post("/sleep", json={"drain": drain})).status_code == 200
        ended = data(await asyncio.wait_for(asking, 30))
        assert ended[-1]["choices"][0]["finish_reason"] == "abort"
        assert (await http.get("/models/chat")).json()["state"] == "asleep"
