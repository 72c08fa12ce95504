"""Which sequences compute which tokens in a step: continuous batching with chunked prefill, and who gives way.

Requests are served in order of arrival. When pages run out the youngest gives way: its sequence is suspended, so
that its pages may move to the host; when that makes no room it is let go, and its tokens are computed again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from torpor.actors.engine.plan import Chunk
from torpor.actors.engine.request import Place, Request
from torpor.actors.engine.sampling import Chosen
from torpor.actors.engine.sequences import SequenceBook
from torpor.actors.messages import FinishReason, TokenEvent


@dataclass(frozen=True, slots=True)
class Limits:
    """whole_prompts: a request begins when there are pages for its whole prompt, else for its first chunk.

    state_block: where layers have states the tokens of a block, at whose borders states can be kept for prompts that
    begin alike; else 0.
    """

    max_running: int
    step_tokens: int  # prefill tokens in one step
    whole_prompts: bool = True
    state_block: int = 0


def _arrival(request: Request) -> int:
    return request.key


class Scheduler:
    """Used from the step thread only. Every request is in exactly one of the three lists, in order of arrival."""

    def __init__(self, book: SequenceBook, limits: Limits) -> None:
        self._book = book
        self._limits = limits
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._suspended: list[Request] = []
        self._full = False  # nothing more fits until pages are given back
        self.preemptions = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._suspended)

    def add(self, request: Request) -> None:
        insort(self._waiting, request, key=_arrival)

    def cancel(self, request_ids: SequenceOf[str]) -> list[TokenEvent]:
        """End these; unknown ids are ignored."""
        wanted = set(request_ids)
        found = [r for r in (*self._waiting, *self._running, *self._suspended) if r.id in wanted]
        return [self._end(request, FinishReason.ABORT) for request in found]

    def park(self) -> None:
        """Suspend all that run, so that nothing is computed. None gave way: all come back when there is room."""
        for request in tuple(self._running):
            self._set_aside(request)
        self._full = False

    def thaw(self, anew: bool = False) -> None:
        """After `park`. Whose K and V a sleep has discarded is computed again, from the tokens so far.

        anew: all are, since what they have was computed by other weights.
        """
        for request in tuple(self._suspended):
            if anew or self._book.contents_lost(request.key):
                self._release(request)

    def schedule(self) -> tuple[list[Chunk], list[TokenEvent]]:
        """The next step's chunks, pages made for them; and the ends of requests that can never fit."""
        chunks: list[Chunk] = []
        ended: list[TokenEvent] = []
        budget = self._limits.step_tokens
        for request in tuple(self._running):
            if request.place is Place.RUNNING:  # an older one may have taken its pages
                budget -= self._advance(request, budget, chunks, ended)
        while budget > 0 and (joining := self._next(ended)) is not None:
            budget -= self._advance(joining, budget, chunks, ended)
        return chunks, ended

    def complete(
        self, chunks: SequenceOf[Chunk], choose: Callable[[Request, int], Chosen]
    ) -> list[TokenEvent]:
        """After the forward: the chunks' K and V are there. choose(request, i) samples from the i-th logits."""
        by_key = {request.key: request for request in self._running}
        events: list[TokenEvent] = []
        wanted = 0
        for chunk in chunks:
            request = by_key[chunk.key]
            self._book.commit(chunk.key, chunk.tokens)
            request.computed += len(chunk.tokens)
            if request.computed == self._next_snapshot(request, request.computed - 1):
                self._book.snapshot(request.key)
            if chunk.wants_logits:
                events.append(request.accept(choose(request, wanted)))
                wanted += 1
                if request.finish is not None:
                    self._drop(request)
        return events

    def _advance(self, request: Request, budget: int, chunks: list[Chunk], ended: list[TokenEvent]) -> int:
        """Add the request's next chunk if there are pages for it; returns the prefill tokens used."""
        decoding = request.decoding
        count = 1 if decoding else min(budget, request.total_tokens - request.computed)
        if (border := self._next_snapshot(request, request.computed)) is not None:
            count = min(count, border - request.computed)
        while count > 0 and not self._make_room(request, request.computed + count, ended):
            count = count // 2 if request.place is Place.RUNNING else 0
        if count <= 0:
            return 0
        end = request.computed + count
        chunks.append(
            Chunk(
                request.key,
                request.computed,
                request.tokens(request.computed, end),
                end == request.total_tokens,
            )
        )
        return 0 if decoding else count

    def _next_snapshot(self, request: Request, behind: int) -> int | None:
        """The first place after `behind` tokens where states are kept: the prompt's last border, and every so often.

        Between these places a prefix cannot be taken up: a copy of all states for every block would crowd them out.
        """
        block = self._limits.state_block
        if not block:
            return None
        often = max(self._limits.step_tokens // block, 1) * block
        last = (len(request.prompt) - 1) // block * block
        return min(place for place in (last, (behind // often + 1) * often) if place > behind)

    def _make_room(self, request: Request, capacity_tokens: int, ended: list[TokenEvent]) -> bool:
        """False: it was suspended or ended, or runs on, and fewer tokens may find room."""
        pushed = False  # somebody was suspended, and their pages did not leave the device
        while not self._book.resize(request.key, capacity_tokens):
            youngest = self._running[-1]
            if self._suspended and (pushed or youngest is request):
                self._release(self._suspended[-1])
            elif youngest is not request:
                self._suspend(youngest)
                pushed = True
            elif len(self._running) > 1:
                self._suspend(request)
                return False
            elif not self._limits.whole_prompts and capacity_tokens > request.computed + 1:
                return False
            else:
                ended.append(self._end(request, FinishReason.ERROR, self._too_small(capacity_tokens)))
                return False
        return True

    def _next(self, ended: list[TokenEvent]) -> Request | None:
        """The next request to run beside those that do: a suspended one, else a waiting one."""
        while not self._full or not self._running:
            if self._suspended:
                request = self._suspended[0]
            elif self._waiting and len(self._running) < self._limits.max_running:
                request = self._waiting[0]
            else:
                return None
            if self._fits(request):
                request.place = Place.RUNNING
                insort(self._running, request, key=_arrival)
                return request
            if self._running:
                self._full = True
            elif len(self._suspended) > 1:
                self._release(self._suspended[-1])
            else:
                ended.append(self._end(request, FinishReason.ERROR, self._too_small(request.total_tokens)))
        return None

    def _fits(self, request: Request) -> bool:
        """Bring its pages to the device, making its sequence first if it has none; on False nothing has changed."""
        if request.place is Place.SUSPENDED:
            if not self._book.resume(request.key):
                return False
            self._suspended.remove(request)
            return True
        total = request.total_tokens
        matched = self._book.create(request.key, request.scope, request.tokens(0, total))
        if not (
            self._book.resume(request.key) and self._book.resize(request.key, self._begin(matched, total))
        ):
            self._book.close(request.key)
            return False
        self._waiting.remove(request)
        request.computed = matched
        if request.cached_tokens is None:
            request.cached_tokens = matched
        return True

    def _begin(self, matched: int, total: int) -> int:
        """Tokens that there must be room for before a request begins."""
        if self._limits.whole_prompts:
            return total
        return min(total, matched + (self._limits.step_tokens if self._running else 1))

    def _suspend(self, request: Request) -> None:
        self._set_aside(request)
        self._full = True  # until somebody ends: it would only be pushed out again
        self.preemptions += 1

    def _set_aside(self, request: Request) -> None:
        self._book.suspend(request.key)
        self._running.remove(request)
        request.place = Place.SUSPENDED
        insort(self._suspended, request, key=_arrival)

    def _release(self, request: Request) -> None:
        """Let a suspended sequence go; what it computed is found again where its blocks survive."""
        self._book.close(request.key)
        self._suspended.remove(request)
        request.place, request.computed = Place.WAITING, 0
        insort(self._waiting, request, key=_arrival)

    def _end(self, request: Request, reason: FinishReason, error: str = "") -> TokenEvent:
        event = request.end(reason, error)
        self._drop(request)
        return event

    def _drop(self, request: Request) -> None:
        if request.place is Place.WAITING:
            self._waiting.remove(request)
        else:
            self._book.close(request.key)
            (self._running if request.place is Place.RUNNING else self._suspended).remove(request)
            self._full = False

    @staticmethod
    def _too_small(tokens: int) -> str:
        return f"the KV pool has no room for {tokens} tokens of one text; raise kv_cache.gpu_bytes"
