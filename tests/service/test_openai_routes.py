"""The OpenAI surface: whole answers, streams, choices, usage, and a closed gate."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from service_fakes import MemoryInference
from service_rig import Rig

from torpor.actors.messages import FinishReason

HELLO = {"model": "chat", "messages": [{"role": "user", "content": "Capital of France?"}]}


def events_of(answer: httpx.Response) -> list[Any]:
    """The data of every event; the last one must be [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_chat_completion_has_text_usage_and_cached_tokens(http: httpx.AsyncClient) -> None:
    body = (await http.post("/v1/chat/completions", json=HELLO)).json()
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Paris."}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 7},
    }


async def test_a_completion_has_text(http: httpx.AsyncClient) -> None:
    body = (await http.post("/v1/completions", json={"model": "chat", "prompt": "The capital is"})).json()
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "Paris.")


async def test_what_is_asked_for_reaches_the_model(
    http: httpx.AsyncClient, inference: MemoryInference
) -> None:
    asked = {
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "temperature": 0,
        "top_p": 0.5,
        "seed": 4,
        "stop": ["\n", "END"],
        "cache_salt": "tenant-1",
    }
    await http.post("/v1/chat/completions", json=HELLO | asked)
    (seen,) = inference.seen
    sampling = seen.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (6, 0.0, 0.5)
    assert (sampling.seed, sampling.stop, seen.scope) == (4, ("\n", "END"), "tenant-1")
    assert seen.messages == ({"role": "user", "content": "Capital of France?"},)


async def test_defaults_are_those_that_openai_clients_expect(
    http: httpx.AsyncClient, inference: MemoryInference
) -> None:
    await http.post("/v1/chat/completions", json=HELLO)
    await http.post("/v1/completions", json={"model": "chat", "prompt": "x"})
    chat, completion = (seen.sampling for seen in inference.seen)
    assert (chat.max_tokens, chat.temperature, chat.top_p, chat.seed) == (None, 1.0, 1.0, None)
    assert completion.max_tokens == 16


async def test_text_parts_are_joined_and_others_refused(
    http: httpx.AsyncClient, inference: MemoryInference
) -> None:
    parts = [{"type": "text", "text": "Capital "}, {"type": "text", "text": "of France?"}]
    await http.post(
        "/v1/chat/completions", json={"model": "chat", "messages": [{"role": "user", "content": parts}]}
    )
    assert inference.seen[0].messages == ({"role": "user", "content": "Capital of France?"},)
    parts.append({"type": "image_url"})
    answer = await http.post(
        "/v1/chat/completions", json={"model": "chat", "messages": [{"role": "user", "content": parts}]}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")


@pytest.mark.parametrize(("prompt", "count"), [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)])
async def test_prompts_come_as_text_or_tokens_one_or_several(
    http: httpx.AsyncClient, inference: MemoryInference, prompt: object, count: int
) -> None:
    body = (await http.post("/v1/completions", json={"model": "chat", "prompt": prompt, "n": 2})).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
    assert body["usage"]["prompt_tokens"] == 9 * count
    assert body["usage"]["completion_tokens"] == 3 * 2 * count
    assert len({seen.id for seen in inference.seen}) == 2 * count


async def test_choices_of_one_seed_differ(http: httpx.AsyncClient, inference: MemoryInference) -> None:
    await http.post("/v1/chat/completions", json=HELLO | {"n": 3, "seed": 10})
    assert [seen.sampling.seed for seen in inference.seen] == [10, 11, 12]


async def test_unknown_fields_are_ignored_and_echoed(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=HELLO | {"user": "u", "metadata": {}})
    assert answer.status_code == 200
    assert answer.headers["Torpor-Ignored"] == "metadata, user"


async def test_token_ids_are_given_when_asked_for(http: httpx.AsyncClient) -> None:
    body = (await http.post("/v1/chat/completions", json=HELLO | {"return_token_ids": True})).json()
    assert body["choices"][0]["token_ids"] == [100, 101, 102]


async def test_a_chat_stream_has_role_text_finish_usage_and_done(http: httpx.AsyncClient) -> None:
    asked = HELLO | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events_of(await http.post("/v1/chat/completions", json=asked))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Paris."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 4 + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_a_completion_stream_has_no_usage_unless_asked_for(http: httpx.AsyncClient) -> None:
    chunks = events_of(
        await http.post("/v1/completions", json={"model": "chat", "prompt": "x", "stream": True})
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Paris."
    assert all("usage" not in chunk for chunk in chunks)


async def test_streamed_choices_come_interleaved_and_each_ends_once(http: httpx.AsyncClient) -> None:
    chunks = events_of(await http.post("/v1/chat/completions", json=HELLO | {"stream": True, "n": 2}))
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Paris."
        assert [choice["finish_reason"] for choice in mine].count("stop") == 1


async def test_an_abort_by_a_drain_ends_the_answer_with_that_reason(
    http: httpx.AsyncClient, inference: MemoryInference
) -> None:
    """G2: with the tokens so far."""
    inference.end = FinishReason.ABORT
    body = (await http.post("/v1/chat/completions", json=HELLO)).json()
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["message"]["content"]) == (
        "abort",
        "Paris.",
    )


async def test_a_model_that_breaks_is_an_error_whole_and_an_error_event_in_a_stream(
    http: httpx.AsyncClient, inference: MemoryInference
) -> None:
    """G3: no request ends in silence."""
    inference.fail_after = 2
    whole = await http.post("/v1/chat/completions", json=HELLO)
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "generation_failed")
    chunks = events_of(await http.post("/v1/chat/completions", json=HELLO | {"stream": True}))
    assert "the step loop died" in chunks[-1]["error"]["message"]
    assert inference.running == set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_sleeping_model_is_503_with_retry_after_and_the_reason(rig: Rig, stream: bool) -> None:
    """G3, F3: also for a stream, whose status is decided by its first token."""
    await rig.http.post("/sleep", json={})
    answer = await rig.http.post("/v1/chat/completions", json=HELLO | {"stream": stream})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "3")
    problem = answer.json()
    assert (problem["code"], problem["reason"]) == ("gate_closed", "asleep")
    assert "/models/chat/wake" in problem["hint"]
    await rig.http.post("/wake", json={})
    assert (await rig.http.post("/v1/chat/completions", json=HELLO)).status_code == 200


async def test_what_the_engine_cannot_serve_is_400_with_its_reason(rig: Rig) -> None:
    rig.inference.invalid = "9000 tokens, the context has 8192: shorten the prompt"
    answer = await rig.http.post("/v1/chat/completions", json=HELLO)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert "shorten the prompt" in answer.json()["error"]["message"]


async def test_a_full_waiting_list_is_429_with_retry_after(rig: Rig) -> None:
    rig.inference.full = True
    answer = await rig.http.post("/v1/chat/completions", json=HELLO)
    assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
    assert answer.headers["Retry-After"] == "3"


async def test_when_one_choice_is_refused_the_others_are_closed(rig: Rig) -> None:
    """G4: nothing goes on for an answer that nobody gets."""
    asked = iter([None, None, "paused"])
    rig.inference.gate = lambda model: next(asked)
    answer = await rig.http.post("/v1/chat/completions", json=HELLO | {"n": 3})
    assert answer.status_code == 503
    assert rig.inference.running == set()
    assert len(rig.inference.closed) == 2


async def test_models_are_listed_asleep_or_not(wide_rig: Rig) -> None:
    await wide_rig.http.post("/models/chat/sleep", json={})
    listed = (await wide_rig.http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["chat", "draft"]
    assert (await wide_rig.http.get("/v1/models/chat")).json()["object"] == "model"
    assert (await wide_rig.http.get("/models/chat")).json()["state"] == "asleep"
