"""An abort ends also those who wait for a closed gate, wherever they do (G2, G3)."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_rig import GATE, Rig, app_over, client_of, config_of, make_rig

from torpor.actors.messages import Kind, OperationRequest, Origin

QUEUE = replace(GATE, when_closed="queue")


@pytest.fixture
async def queueing(tmp_path: Path) -> AsyncIterator[Rig]:
    async with make_rig(tmp_path, {"chat": 1, "draft": 1}, QUEUE) as rig:
        yield rig


def ask(http: httpx.AsyncClient, **fields: Any) -> asyncio.Task[httpx.Response]:
    body = {"model": "chat", "prompt": "Hello", **fields}
    return asyncio.create_task(http.post("/v1/completions", json=body))


async def waiting(rig: Rig, count: int, model: str = "chat") -> None:
    line = f'torpor_queue_length{{model="{model}"}} {count:.1f}'
    async with asyncio.timeout(5):
        while line not in rig.app.state.context.metrics.text().decode():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def ends(answer: httpx.Response) -> list[tuple[str, str]]:
    assert answer.status_code == 200, answer.text
    return [(choice["text"], choice["finish_reason"]) for choice in answer.json()["choices"]]


@asynccontextmanager
async def beside(rig: Rig) -> AsyncIterator[Rig]:
    """Another front end of the same cluster."""
    app = app_over(
        rig.coordinator, rig.inference, config_of({"chat": 1}, Path("unused"), QUEUE), io.StringIO()
    )
    async with client_of(app) as http:
        yield replace(rig, app=app, http=http)
        await app.state.context.inference.close()


async def test_one_who_waits_is_ended_by_its_name_and_leaves_the_others_waiting(queueing: Rig) -> None:
    http = queueing.http
    await http.post("/models/chat/sleep")
    mine, streamed, other = ask(http, rid="mine", n=2), ask(http, rid="streamed", stream=True), ask(http)
    elsewhere = ask(http, model="draft", rid="mine")
    await waiting(queueing, 4)
    assert ends(await elsewhere) == [("Paris.", "stop")]
    done = await http.post("/m/chat/abort_request", json={"rid": "mine"})
    assert (done.status_code, done.json()) == (200, {"aborted_requests": 2})
    answer = await asyncio.wait_for(mine, 2)
    assert (answer.json()["id"], ends(answer)) == ("mine", [("", "abort")] * 2)
    await waiting(queueing, 2)
    await http.post("/m/chat/abort_request", json={"rid": "streamed"})
    assert '"finish_reason":"abort"' in (await asyncio.wait_for(streamed, 2)).text
    assert not other.done()
    await http.post("/models/chat/wake")
    assert ends(await other) == [("Paris.", "stop")]
    assert queueing.inference.running == set()


@pytest.mark.parametrize("call", ["/abort_request", "/pause_generation", "/pause"])
async def test_what_ends_all_ends_those_who_wait_at_every_front_end(queueing: Rig, call: str) -> None:
    async with beside(queueing) as other:
        await queueing.http.post("/models/chat/sleep")
        asked = [ask(queueing.http), ask(other.http), ask(other.http)]
        await waiting(queueing, 1)
        await waiting(other, 2)
        done = await queueing.http.post(f"/m/chat{call}", json={"abort_all": True})
        assert done.status_code == 200, done.text
        if call == "/abort_request":
            assert done.json() == {"aborted_requests": 3}
        for task in asked:
            assert ends(await asyncio.wait_for(task, 2)) == [("", "abort")]
        later = ask(other.http)
        await waiting(other, 1)
        assert not later.done()
        later.cancel()


async def test_an_update_that_ends_all_ends_those_who_wait(queueing: Rig) -> None:
    """SGLang's `abort_all_requests`."""
    await queueing.http.post("/models/chat/sleep", json={"tags": ["kv_cache"]})
    asked = ask(queueing.http)
    await waiting(queueing, 1)
    body = {"model_path": "/w", "abort_all_requests": True}
    await queueing.http.post("/m/chat/update_weights_from_disk", json=body)
    assert ends(await asyncio.wait_for(asked, 2)) == [("", "abort")]


async def test_one_who_is_on_its_way_in_when_it_is_aborted_does_not_run(queueing: Rig) -> None:
    """It is let in, or refused again, after the abort had passed the leader."""
    queueing.inference.delay_s, queueing.inference.endless = 0.1, True
    asked = ask(queueing.http, rid="mine")
    async with asyncio.timeout(5):
        while not queueing.inference.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running, queueing.inference.running = queueing.inference.running, set()  # not known there yet
    done = await queueing.http.post("/m/chat/abort_request", json={"rid": "mine"})
    assert done.json() == {"aborted_requests": 0}
    queueing.inference.running |= running
    assert ends(await asyncio.wait_for(asked, 2)) == [("", "abort")]
    assert len(queueing.inference.closed) == 1, "it was ended at the leader, too"


async def test_waiting_for_an_idle_model_begins_no_wake_for_who_was_aborted(tmp_path: Path) -> None:
    """G6: nobody is left who wants it; the wake that runs goes on."""
    async with make_rig(tmp_path, {"chat": 1}) as rig:
        by_idleness = OperationRequest(Kind.SLEEP, "chat", origin=Origin.IDLENESS)
        await rig.coordinator.wait((await rig.coordinator.submit(by_idleness)).id)
        stage = rig.rank().hold("stage")
        asked = ask(rig.http, rid="mine")
        await waiting(rig, 1)
        assert (await rig.http.post("/abort_request", json={"rid": "mine"})).json() == {"aborted_requests": 1}
        assert ends(await asyncio.wait_for(asked, 2)) == [("", "abort")]
        stage.let_go()
        assert ends(await ask(rig.http)) == [("Paris.", "stop")]
        assert len([one for one in await rig.coordinator.operations("chat") if one.kind is Kind.WAKE]) == 1
