"""One request on its way: its prompt, what was generated, and what may be said of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from torpor.actors.engine.detokenizer import IncrementalDetokenizer, StopStrings
from torpor.actors.engine.sampling import Chosen, Sampler
from torpor.actors.messages import FinishReason, TokenEvent, TokenLogprob


class Place(enum.StrEnum):
    WAITING = "waiting"  # has no sequence; perhaps has generated tokens, to be computed again
    RUNNING = "running"  # its sequence is active
    SUSPENDED = "suspended"  # its sequence is kept, its pages may be elsewhere


@dataclass(slots=True)
class Request:
    """Made by `prepare`, then owned by the step thread.

    computed: leading tokens of prompt + output whose K and V lie in the pages.
    """

    id: str
    scope: str
    prompt: tuple[int, ...]
    max_tokens: int
    end_token_ids: frozenset[int]
    sampler: Sampler
    detokenizer: IncrementalDetokenizer
    stops: StopStrings
    key: int = -1  # the order of arrival; names its sequence on all ranks
    place: Place = Place.WAITING
    output: list[int] = field(default_factory=list)
    computed: int = 0
    cached_tokens: int | None = None  # of the first start
    finish: FinishReason | None = None

    @property
    def total_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def begun(self) -> bool:
        return self.cached_tokens is not None

    @property
    def decoding(self) -> bool:
        """All but the newest token are computed."""
        return self.computed == self.total_tokens - 1 and bool(self.output)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens start to end of prompt + output."""
        at = len(self.prompt)
        if start >= at:
            return tuple(self.output[start - at : end - at])
        return self.prompt[start : min(end, at)] + tuple(self.output[: max(end - at, 0)])

    def accept(self, chosen: Chosen) -> TokenEvent:
        """Take a new token. Its event's text may be empty, or more than this token's. Sets `finish` on the last."""
        token_id = chosen.token_id
        self.output.append(token_id)
        if token_id in self.end_token_ids:
            self.finish = FinishReason.STOP
            text = self.stops.add(self.detokenizer.flush()) + self.stops.flush()
            return self._event(text, chosen)
        text = self.stops.add(self.detokenizer.add(token_id))
        if self.stops.stopped:
            self.finish = FinishReason.STOP
        elif len(self.output) >= self.max_tokens:
            text += self.stops.add(self.detokenizer.flush()) + self.stops.flush()
            self.finish = FinishReason.STOP if self.stops.stopped else FinishReason.LENGTH
        return self._event(text, chosen)

    def end(self, reason: FinishReason, error: str = "") -> TokenEvent:
        """The last event of a request that ends without a last token."""
        self.finish = reason
        text = ""
        if reason is FinishReason.ABORT:
            text = self.stops.add(self.detokenizer.flush()) + self.stops.flush()
        return self._event(text, None, error)

    def _event(self, text: str, chosen: Chosen | None, error: str = "") -> TokenEvent:
        return TokenEvent(
            request=self.id,
            text=text,
            token_ids=() if chosen is None else (chosen.token_id,),
            finish_reason=self.finish,
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.output),
            cached_tokens=self.cached_tokens or 0,
            error=error,
            logprobs=() if chosen is None or chosen.logprob is None else (self._logprob(chosen),),
        )

    def _logprob(self, chosen: Chosen) -> TokenLogprob:
        def told(token_id: int, logprob: float) -> TokenLogprob:
            return TokenLogprob(token_id, self.detokenizer.alone(token_id), logprob)

        assert chosen.logprob is not None
        top = tuple(told(*one) for one in chosen.likeliest)
        return replace(told(chosen.token_id, chosen.logprob), top=top)
