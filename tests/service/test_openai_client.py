"""The openai Python package as a client of the real application."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from service_fakes import MemoryInference
from service_rig import Rig

from torpor.actors.messages import TokenLogprob
from torpor.actors.ports import ContextTooLong

MESSAGES = [{"role": "user", "content": "Capital of France?"}]


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(rig.app, raise_app_exceptions=False)
    http = httpx.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(
        api_key="none", base_url="http://torpor.test/v1", http_client=http, max_retries=0
    ) as made:
        yield made


def likeliest(token: str, logprob: float, *others: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(ord(token[0]), token, logprob, (TokenLogprob(ord(token[0]), token, logprob), *others))


@pytest.fixture
def told(inference: MemoryInference) -> None:
    inference.logprobs = [
        likeliest("Par", -0.1, TokenLogprob(9, "Lon", -2.5)),
        likeliest("is", -0.2),
        likeliest(".", -0.3),
    ]


async def test_a_chat_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="chat", messages=MESSAGES, seed=1, n=2)
    assert [choice.message.content for choice in whole.choices] == ["Paris.", "Paris."]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 7
    stream = await client.chat.completions.create(
        model="chat", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Paris."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.usefixtures("told")
async def test_a_chats_logprobs_whole_and_streamed(
    client: openai.AsyncOpenAI, inference: MemoryInference
) -> None:
    whole = await client.chat.completions.create(
        model="chat", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    assert inference.seen[0].sampling.logprobs == 2
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(one.token, one.bytes, one.logprob) for one in logprobs.content] == [
        ("Par", [80, 97, 114], -0.1),
        ("is", [105, 115], -0.2),
        (".", [46], -0.3),
    ]
    assert [one.token for one in logprobs.content[0].top_logprobs] == ["Par", "Lon"]
    stream = await client.chat.completions.create(model="chat", messages=MESSAGES, logprobs=True, stream=True)
    parts = [chunk.choices[0].logprobs async for chunk in stream]
    streamed = [one.token for part in parts if part is not None for one in part.content or ()]
    assert streamed == ["Par", "is", "."]


@pytest.mark.usefixtures("told")
async def test_a_completions_logprobs_have_offsets_into_the_text(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="chat", prompt="The capital is ", logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (["Par", "is", "."], [0, 3, 5])
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"Par": -0.1, "Lon": -2.5}
    stream = await client.completions.create(model="chat", prompt="The", logprobs=0, stream=True)
    offsets = [
        offset
        async for chunk in stream
        for offset in (chunk.choices[0].logprobs or logprobs).text_offset or ()
    ]
    assert offsets[:3] == [0, 3, 5]


async def test_an_echo_is_what_the_text_begins_with(client: openai.AsyncOpenAI) -> None:
    prompts = ["The capital is ", "It is "]
    whole = await client.completions.create(model="chat", prompt=prompts, echo=True, n=2)
    assert [choice.text for choice in whole.choices] == [f"{one}Paris." for one in prompts for _ in range(2)]
    stream = await client.completions.create(model="chat", prompt="It is ", echo=True, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "It is Paris."


async def test_what_load_generators_ask_for_reaches_the_model(
    client: openai.AsyncOpenAI, inference: MemoryInference
) -> None:
    await client.completions.create(
        model="chat",
        prompt="x",
        best_of=1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"7": -100},
        extra_body={"ignore_eos": True, "min_tokens": 4, "top_k": -1, "stop_token_ids": [3]},
    )
    sampling = inference.seen[0].sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert sampling.logit_bias == ((7, -100.0),)
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.top_k) == (True, 4, 0)
    assert sampling.stop_token_ids == (3,)
    assert sampling.logprobs is None


async def test_errors_are_those_that_the_client_knows(
    client: openai.AsyncOpenAI, rig: Rig, inference: MemoryInference
) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="gone", messages=MESSAGES)
    inference.refusal = ContextTooLong(
        "the prompt's 9000 tokens exceed the 8192 tokens of the model's context"
    )
    with pytest.raises(openai.BadRequestError, match="8192") as caught:
        await client.chat.completions.create(model="chat", messages=MESSAGES)
    assert caught.value.code == "context_length_exceeded"
    inference.refusal = None
    await rig.http.post("/sleep", json={})
    with pytest.raises(openai.InternalServerError) as closed:
        await client.chat.completions.create(model="chat", messages=MESSAGES)
    assert (closed.value.status_code, closed.value.response.headers["Retry-After"]) == (503, "3")


@pytest.mark.parametrize(
    ("chat", "asked", "param"),
    [
        (True, {"top_logprobs": 2}, "top_logprobs"),
        (True, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (False, {"best_of": 3}, "best_of"),
        (False, {"echo": True, "logprobs": 1}, "echo"),
        (False, {"echo": True, "prompt": [1, 2]}, "echo"),
        (False, {"suffix": "end"}, "suffix"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    client: openai.AsyncOpenAI, inference: MemoryInference, chat: bool, asked: dict[str, object], param: str
) -> None:
    calls = client.chat.completions if chat else client.completions
    plain: dict[str, object] = {"messages": MESSAGES} if chat else {"prompt": "x"}
    with pytest.raises(openai.BadRequestError) as caught:
        await calls.create(model="chat", **(plain | asked))
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", param)
    assert inference.seen == []
