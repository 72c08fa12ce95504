"""A model in memory: Inference whose answers are set by the test, behind the same gate as the in-memory ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from torpor.actors.messages import FinishReason, GateReason, GenerateRequest, TokenEvent, TokenLogprob
from torpor.actors.ports import EndWaiting, GateClosed, InvalidRequest, LeaderLost, QueueFull


@dataclass
class MemoryInference:
    """Says `words`, one an event, ids counted from 100. `gate` is asked at admission: None means open."""

    models: tuple[str, ...] = ("chat",)
    words: tuple[str, ...] = ("Par", "is", ".")
    cached_tokens: int = 7
    gate: Callable[[str], GateReason | str | None] = lambda model: None
    invalid: str = ""
    full: bool = False
    delay_s: float = 0.0
    fail_after: int | None = None  # events before the model breaks
    lost: list[LeaderLost] = field(
        default_factory=list
    )  # what the next requests meet before their first token
    endless: bool = False
    end: FinishReason = FinishReason.STOP
    refusal: Exception | None = None
    logprobs: Sequence[TokenLogprob] = ()  # of the words, where a request asks for some
    seen: list[GenerateRequest] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)  # requests whose stream was closed before its end
    running: set[str] = field(default_factory=set)
    speaking: set[str] = field(default_factory=set)  # requests that have been told a word
    aborted: set[str] = field(default_factory=set)
    ended: bool = False  # as a front end whose connection to its leaders is closed
    why: str = ""
    waiting: list[EndWaiting] = field(default_factory=list)  # one of each front end over this

    def on_abort(self, end: EndWaiting) -> None:
        self.waiting.append(end)

    async def abort_requests(self, model: str, request: str | None) -> int:
        if model not in self.models:
            raise KeyError(model)
        found = {one for one in self.running if request in (None, one) or one.startswith(f"{request}/")}
        self.aborted |= found
        return len(found) + sum(end(model, request) for end in self.waiting)

    async def close(self, why: str = "this front end is ending") -> None:
        self.ended, self.why = True, why

    async def generate(self, model: str, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        self.seen.append(request)
        if model not in self.models:
            raise KeyError(model)
        if self.ended:
            raise GateClosed("ending", self.why)
        reason = self.gate(model)
        if reason is not None:
            raise GateClosed(reason)
        if self.refusal is not None:
            raise self.refusal
        if self.invalid:
            raise InvalidRequest(self.invalid)
        if self.full:
            raise QueueFull("1024 wait")
        if self.lost:
            raise self.lost.pop(0)
        self.running.add(request.id)
        ended = False
        try:
            async for event in self._events(request):
                ended = event.finish_reason is not None
                yield event
        finally:
            self.running.discard(request.id)
            if not ended:
                self.closed.append(request.id)

    async def _events(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        count = 0
        while self.endless or count < len(self.words):
            await asyncio.sleep(self.delay_s)
            if request.id in self.aborted:
                yield TokenEvent(request.id, finish_reason=FinishReason.ABORT, completion_tokens=count)
                return
            if self.ended:
                yield TokenEvent(request.id, finish_reason=FinishReason.ERROR, error=self.why)
                return
            if self.fail_after is not None and count >= self.fail_after:
                yield TokenEvent(request.id, finish_reason=FinishReason.ERROR, error="the step loop died")
                return
            text = self.words[count % len(self.words)]
            told = () if request.sampling.logprobs is None else tuple(self.logprobs[count : count + 1])
            yield TokenEvent(request.id, text=text, token_ids=(100 + count,), logprobs=told)
            self.speaking.add(request.id)
            count += 1
        yield TokenEvent(
            request.id,
            finish_reason=self.end,
            prompt_tokens=9,
            completion_tokens=count,
            cached_tokens=self.cached_tokens,
        )
