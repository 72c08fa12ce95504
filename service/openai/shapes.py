"""The answers of the OpenAI surface, whole and in chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torpor.actors.messages import FinishReason, TokenEvent, TokenLogprob
from torpor.service.openai.generation import Choice, generation_problem
from torpor.service.openai.logprobs import chat_logprobs, completion_logprobs
from torpor.service.problems import openai_error
from torpor.service.sse import SSE_DONE, sse_json


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of one answer repeats. choices_per_prompt: whose prompt tokens count once."""

    id: str
    created_at: int
    model: str
    chat: bool
    choices_per_prompt: int
    token_ids: bool
    echoes: Sequence[str] = ()  # what each choice's text begins with

    def echo(self, choice: int) -> str:
        return self.echoes[choice] if self.echoes else ""

    def logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        """None where none were asked for. offset: characters of the choice's text before these tokens."""
        if not tokens:
            return None
        return chat_logprobs(tokens) if self.chat else completion_logprobs(tokens, offset)

    def shell(self, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created_at, "model": self.model}


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: TokenEvent | None = None


async def whole_answer(head: AnswerHead, events: AsyncIterator[Choice], count: int) -> dict[str, Any]:
    """Raises a Problem when any choice ended in an error."""
    choices = [_Choice() for _ in range(count)]
    async for at, event in events:
        if event.finish_reason is FinishReason.ERROR:
            raise generation_problem(event)
        choices[at].text.append(event.text)
        choices[at].token_ids.extend(event.token_ids)
        choices[at].logprobs.extend(event.logprobs)
        if event.finish_reason is not None:
            choices[at].last = event
    shown = []
    for at, choice in enumerate(choices):
        text = head.echo(at) + "".join(choice.text)
        body: dict[str, Any] = {"index": at}
        body |= {"message": {"role": "assistant", "content": text}} if head.chat else {"text": text}
        finish = choice.last and choice.last.finish_reason
        body |= {"logprobs": head.logprobs(choice.logprobs, 0), "finish_reason": finish}
        if head.token_ids:
            body["token_ids"] = choice.token_ids
        shown.append(body)
    ends = [choice.last for choice in choices if choice.last is not None]
    return {**head.shell(chunk=False), "choices": shown, "usage": usage(head, ends)}


async def answer_chunks(
    head: AnswerHead, events: AsyncIterator[Choice], count: int, include_usage: bool
) -> AsyncIterator[bytes]:
    """One SSE event a batch of tokens; an error ends it with an `error` event. [DONE] closes every stream."""
    extra = {"usage": None} if include_usage else {}
    if head.chat:
        for at in range(count):
            delta = {"index": at, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield sse_json({**head.shell(chunk=True), "choices": [delta], **extra})
    given = [0] * count  # characters of tokens whose logprobs were told
    begun: set[int] = set()
    ends: dict[int, TokenEvent] = {}
    async for at, event in events:
        if event.finish_reason is FinishReason.ERROR:
            yield sse_json({"error": openai_error(generation_problem(event))})
            yield SSE_DONE
            return
        choice: dict[str, Any] = {"index": at}
        if head.chat:
            choice["delta"] = {"content": event.text} if event.text else {}
        else:
            choice["text"] = event.text if at in begun else head.echo(at) + event.text
            begun.add(at)
        choice |= {
            "logprobs": head.logprobs(event.logprobs, given[at]),
            "finish_reason": event.finish_reason,
        }
        given[at] += sum(len(token.text) for token in event.logprobs)
        if head.token_ids:
            choice["token_ids"] = list(event.token_ids)
        yield sse_json({**head.shell(chunk=True), "choices": [choice], **extra})
        if event.finish_reason is not None:
            ends[at] = event
    if include_usage:
        yield sse_json(
            {**head.shell(chunk=True), "choices": [], "usage": usage(head, [ends[at] for at in sorted(ends)])}
        )
    yield SSE_DONE


def usage(head: AnswerHead, ends: list[TokenEvent]) -> dict[str, Any]:
    """A prompt counts once, also when several choices answer it."""
    prompts = ends[:: head.choices_per_prompt]
    prompt_tokens = sum(end.prompt_tokens for end in prompts)
    completion_tokens = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in prompts)},
    }
