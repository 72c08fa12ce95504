"""Sleep while requests run: nobody is lost, nothing answers before the drain is over."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
import pytest
from e2e.serving import Server

STREAMS = 32


def counting(number: int) -> str:
    """A prompt that the model goes on with, and does not end by itself."""
    return ", ".join(str(number + i) for i in range(12)) + ","


async def stream(
    client: httpx.AsyncClient, model: str, number: int, begun: asyncio.Event, tokens: int
) -> tuple[str, float]:
    """One streamed completion: its finish reason (or the status), and when it ended. begun: its first token."""
    body = {
        "model": model,
        "prompt": counting(number),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    finish = "nothing"
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return str(answer.status_code), time.monotonic()
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                begun.set()
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0]["finish_reason"]:
                    finish = choices[0]["finish_reason"]
    return finish, time.monotonic()


async def sleep_under_load(
    server: Server, body: dict[str, object], tokens: int
) -> tuple[list[tuple[str, float]], float, float]:
    """Once 32 streams have begun, /sleep: how and when the streams ended, when it was asked and answered."""
    model = server.model_name()
    limits = httpx.Limits(max_connections=STREAMS + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as client:
        events = [asyncio.Event() for _ in range(STREAMS)]
        tasks = [
            asyncio.create_task(stream(client, model, number, begun, tokens))
            for number, begun in enumerate(events)
        ]
        await asyncio.gather(*(begun.wait() for begun in events))
        asked_at = time.monotonic()
        answer = await client.post("/sleep", json=body)
        answered_at = time.monotonic()
        assert answer.status_code == 200, answer.text
        ends = await asyncio.gather(*tasks)
        late = await stream(client, model, 99, asyncio.Event(), 1)
        assert late[0] == "503"
    return ends, asked_at, answered_at


def live_sequences(server: Server) -> int:
    ranks = server.model()["ranks"]
    assert isinstance(ranks, list)
    return int(ranks[0]["live_sequences"])


def test_a_finishing_drain_lets_every_stream_end_before_sleep_answers(server: Server) -> None:
    """F1, F2, C6: 32 streams, none lost, and no 200 before the last of them is done."""
    drain = {"mode": "finish", "timeout_s": 200}
    ends, asked_at, answered_at = asyncio.run(sleep_under_load(server, {"drain": drain}, 64))
    assert {finish for finish, _ in ends} <= {"length", "stop"}
    last = max(ended_at for _, ended_at in ends)
    assert asked_at < last, "the streams were over before the sleep was asked for: nothing was tested"
    assert last < answered_at + 0.5, "the sleep answered before the last stream was done"
    server.http.post("/wake", json={}).raise_for_status()


def test_an_aborting_drain_ends_every_stream_with_its_reason(server: Server) -> None:
    """G2: aborted requests end with finish reason abort and are counted."""
    ends, asked_at, answered_at = asyncio.run(sleep_under_load(server, {"drain": {"mode": "abort"}}, 1000))
    assert {finish for finish, _ in ends} <= {"abort", "length", "stop"}
    assert sum(finish == "abort" for finish, _ in ends) > STREAMS // 2
    assert answered_at - asked_at < 30
    server.http.post("/wake", json={}).raise_for_status()


@pytest.mark.long  # the same with toy engines: tests/actors/rank, tests/actors/coordinator
def test_a_drain_out_of_time_is_rejected_and_the_gate_opens_again(server: Server) -> None:
    """C6: 504, nothing changed, the running request ends well."""
    answers: list[httpx.Response] = []
    body = {"model": server.model_name(), "prompt": counting(100), "max_tokens": 300, "temperature": 0}

    def run() -> None:
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=240))

    runner = threading.Thread(target=run)
    runner.start()
    while live_sequences(server) == 0:
        assert runner.is_alive(), f"the request ended too early: {answers}"
    sleep = {"drain": {"mode": "finish", "timeout_s": 0.2}}
    rejected = httpx.post(f"{server.url}/sleep", json=sleep, timeout=60)
    assert rejected.status_code == 504, rejected.text
    assert rejected.json()["code"] == "drain_timeout"
    assert server.model()["state"] == "awake"
    runner.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] > 10
    assert server.chat("Are you there?").status_code == 200
