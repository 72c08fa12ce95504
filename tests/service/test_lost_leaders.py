"""A front end keeps a request until its first token: what it does when the leader is lost (G3)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from service_rig import GATE, Rig, make_rig

from torpor.actors.ports import LeaderLost

HELLO = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "return_token_ids": True}
POLICIES = ["reject", "queue", "wake"]


@pytest.fixture
async def rig_of(tmp_path: Path, policy: str) -> AsyncIterator[Rig]:
    gate = replace(GATE, when_closed=policy, queue_timeout_s=3.0)
    async with make_rig(tmp_path, {"chat": 1}, gate) as made:
        yield made


async def ask(rig: Rig, stream: bool = False) -> httpx.Response:
    return await asyncio.wait_for(rig.http.post("/v1/chat/completions", json=HELLO | {"stream": stream}), 10)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("admitted", [True, False])
async def test_a_request_that_was_lost_before_its_first_token_is_submitted_once_more(
    rig_of: Rig, admitted: bool
) -> None:
    """Under another id: the first one may be known at a leader that lives, for a while."""
    rig_of.inference.lost = [LeaderLost("its leader died", admitted)]
    answer = await ask(rig_of)
    assert answer.json()["choices"][0]["token_ids"] == [100, 101, 102], answer.text
    first, second = [seen.id for seen in rig_of.inference.seen]
    assert first != second and second.startswith(first)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_was_let_in_and_lost_twice_is_503(rig_of: Rig, stream: bool) -> None:
    """It may be what the leader dies of."""
    rig_of.inference.lost = [LeaderLost("its leader died", True), LeaderLost("its leader died again", True)]
    answer = await ask(rig_of, stream)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "3")
    assert answer.json()["reason"] == "failed" and "died again" in answer.json()["detail"]
    assert len(rig_of.inference.seen) == 2


@pytest.mark.parametrize("policy", ["queue", "wake"])
async def test_one_that_reached_no_leader_tries_within_its_bound(rig_of: Rig) -> None:
    rig_of.inference.lost = [LeaderLost("nobody there", False)] * 4
    assert (await ask(rig_of)).status_code == 200
    rig_of.inference.lost = [LeaderLost("nobody there", False)] * 1000
    answer = await ask(rig_of)
    assert (answer.status_code, answer.json()["code"]) == (503, "queue_timeout")
    assert len(rig_of.inference.lost) > 980, "not in a busy loop"


@pytest.mark.parametrize("policy", ["reject"])
async def test_a_rejecting_model_tries_once_more_and_at_once(rig_of: Rig) -> None:
    rig_of.inference.lost = [LeaderLost("nobody there", False)] * 2
    answer = await ask(rig_of)
    assert (answer.status_code, answer.json()["code"]) == (503, "gate_closed")


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_model_that_fails_under_a_request_before_its_first_token_is_tried_once_more(
    rig_of: Rig,
) -> None:
    """E.g. since a follower died: the leader ends what runs with an error. The second error is the answer."""
    rig_of.inference.fail_after = 0
    answer = await ask(rig_of)
    assert (answer.status_code, answer.json()["code"]) == (500, "generation_failed")
    assert len(rig_of.inference.seen) == 2
    assert rig_of.inference.running == set()


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_started_stream_ends_with_an_error_event_and_is_not_begun_anew(rig_of: Rig) -> None:
    rig_of.inference.fail_after = 2
    answer = await ask(rig_of, stream=True)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    assert "the step loop died" in json.loads(lines[-2])["error"]["message"]
    assert len(rig_of.inference.seen) == 1
