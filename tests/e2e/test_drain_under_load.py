"""Sleep while requests run: nobody is lost, nothing answers before the drain is over."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
from e2e.serving import Server

STREAMS = 32


async def stream(client: httpx.AsyncClient, model: str, number: int) -> tuple[str, float]:
    """One streamed completion: its finish reason (or "503"), and when it ended."""
    body = {
        "model": model,
        "prompt": f"Tell a long story about the number {number}.",
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
    }
    finish = "nothing"
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return str(answer.status_code), time.monotonic()
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0]["finish_reason"]:
                    finish = choices[0]["finish_reason"]
    return finish, time.monotonic()


async def sleep_under_load(server: Server, body: dict[str, object]) -> tuple[list[tuple[str, float]], float]:
    """32 streams begin, then /sleep; returns how the streams ended and when the sleep answered."""
    model = server.model_name()
    limits = httpx.Limits(max_connections=STREAMS + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as client:
        tasks = [asyncio.create_task(stream(client, model, number)) for number in range(STREAMS)]
        await asyncio.sleep(1.5)  # all are admitted, none is done
        answer = await client.post("/sleep", json=body)
        answered_at = time.monotonic()
        assert answer.status_code == 200, answer.text
        ends = await asyncio.gather(*tasks)
        late = await stream(client, model, 99)
        assert late[0] == "503"
    return ends, answered_at


def test_a_finishing_drain_lets_every_stream_end_before_sleep_answers(server: Server) -> None:
    """F1, F2, C6: 32 streams, none lost, and no 200 before the last of them is done."""
    drain = {"mode": "finish", "timeout_s": 200}
    ends, answered_at = asyncio.run(sleep_under_load(server, {"drain": drain}))
    assert {finish for finish, _ in ends} <= {"length", "stop"}
    assert max(ended_at for _, ended_at in ends) < answered_at + 1.0
    server.http.post("/wake", json={}).raise_for_status()


def test_an_aborting_drain_ends_every_stream_with_its_reason(server: Server) -> None:
    """G2: aborted requests end with finish reason abort and are counted."""
    ends, _ = asyncio.run(sleep_under_load(server, {"drain": {"mode": "abort"}}))
    assert {finish for finish, _ in ends} <= {"abort", "length", "stop"}
    assert any(finish == "abort" for finish, _ in ends)
    server.http.post("/wake", json={}).raise_for_status()


def test_a_drain_out_of_time_is_rejected_and_the_gate_opens_again(server: Server) -> None:
    """C6: 504, nothing changed, the running request ends well."""
    answers: list[httpx.Response] = []
    question = {"max_tokens": 400, "prompt": "Count slowly from one to one thousand:", "temperature": 0}
    body = question | {"model": server.model_name()}
    runner = threading.Thread(target=lambda: answers.append(server.http.post("/v1/completions", json=body)))
    runner.start()
    time.sleep(1.0)
    rejected = httpx.post(
        f"{server.url}/sleep", json={"drain": {"mode": "finish", "timeout_s": 0.2}}, timeout=60
    )
    assert rejected.status_code == 504, rejected.text
    assert rejected.json()["code"] == "drain_timeout"
    assert server.model()["state"] == "awake"
    runner.join()
    assert answers[0].status_code == 200
    assert server.chat("Are you there?").status_code == 200
