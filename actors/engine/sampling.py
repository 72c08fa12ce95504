"""Choosing the next token. A request's draws depend on its seed and its own tokens alone, never on its neighbours."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from torpor.actors.engine.protocol import InvalidPrompt
from torpor.actors.messages import Sampling

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
PENALTY_LIMIT = 2.0
BIAS_LIMIT = 100.0


def check_sampling(sampling: Sampling) -> None:
    """Raises InvalidPrompt for parameters that mean nothing."""
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise InvalidPrompt(f"max_tokens is {sampling.max_tokens}; it must be at least 1")
    if not 0.0 <= sampling.temperature <= 100.0:
        raise InvalidPrompt(f"temperature is {sampling.temperature}; it must be between 0 and 100")
    if not 0.0 < sampling.top_p <= 1.0:
        raise InvalidPrompt(f"top_p is {sampling.top_p}; it must be above 0 and at most 1")
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidPrompt(f"{len(sampling.stop)} stop strings; at most {MAX_STOP_STRINGS}")
    if any(not stop for stop in sampling.stop):
        raise InvalidPrompt("a stop string is empty; leave it out")
    if sampling.top_k < 0:
        raise InvalidPrompt(f"top_k is {sampling.top_k}; it must be at least 1, or 0 for all tokens")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        raise InvalidPrompt(
            f"logprobs of {sampling.logprobs} tokens; it must be between 0 and {MAX_LOGPROBS}"
        )
    for name in ("frequency_penalty", "presence_penalty"):
        penalty = getattr(sampling, name)
        if not -PENALTY_LIMIT <= penalty <= PENALTY_LIMIT:
            raise InvalidPrompt(
                f"{name} is {penalty}; it must be between -{PENALTY_LIMIT} and {PENALTY_LIMIT}"
            )
    wrong = next((bias for _, bias in sampling.logit_bias if not -BIAS_LIMIT <= bias <= BIAS_LIMIT), None)
    if wrong is not None:
        raise InvalidPrompt(f"logit_bias has {wrong}; it must be between -{BIAS_LIMIT} and {BIAS_LIMIT}")


def check_token_ids(sampling: Sampling, vocabulary: int) -> None:
    """Raises InvalidPrompt for ids of tokens that the model does not have."""
    named = [token for token, _ in sampling.logit_bias] + list(sampling.stop_token_ids)
    wrong = next((token for token in named if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise InvalidPrompt(f"token id {wrong} is not in the model's vocabulary of {vocabulary}")


@dataclass(frozen=True, slots=True)
class Chosen:
    """logprob and likeliest ((token id, logprob), likeliest first) only where they were asked for."""

    token_id: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class Likeliest:
    """The likeliest token of each row, found for all rows at once: a GPU is waited for once, not once a row."""

    def __init__(self, logits: torch.Tensor) -> None:
        """logits: (rows, vocabulary)."""
        self._logits = logits

    @cached_property
    def _token_ids(self) -> list[int]:
        token_ids: list[int] = self._logits.argmax(dim=-1).tolist()
        return token_ids

    def __getitem__(self, row: int) -> int:
        return self._token_ids[row]


class Sampler:
    """One request's sampler: one uniform draw a token, turned into a token through the cumulative distribution."""

    def __init__(self, sampling: Sampling, seed: int, ends: Collection[int] = ()) -> None:
        """ends: tokens that end the text, and are not chosen before `min_tokens`."""
        self._sampling = sampling
        self._random = random.Random(seed)
        self._counts: Counter[int] = Counter()
        self._bias = dict(sampling.logit_bias)
        self._ends = sorted(ends) if sampling.min_tokens else []

    @property
    def is_greedy(self) -> bool:
        """Whether it always chooses the likeliest token of the model's own logits, and nothing else is wanted."""
        asked = self._sampling
        changed = self._bias or asked.frequency_penalty or asked.presence_penalty or self._ends
        return asked.temperature == 0.0 and asked.logprobs is None and not changed

    def choose(self, logits: torch.Tensor, output: Sequence[int] = ()) -> Chosen:
        """logits: (vocabulary,), any float type; output: what was chosen before. Greedy at temperature 0."""
        token_id = self._draw(self._adjusted(logits, output))
        if self._sampling.logprobs is None:
            return Chosen(token_id)
        logprobs = torch.log_softmax(logits.to(torch.float32), dim=-1)
        values, token_ids = torch.topk(logprobs, min(self._sampling.logprobs, len(logprobs)))
        likeliest = tuple(zip(token_ids.tolist(), values.tolist(), strict=True))
        return Chosen(token_id, float(logprobs[token_id]), likeliest)

    def _adjusted(self, logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        """What biases, penalties and the least length make of the model's logits."""
        asked = self._sampling
        self._counts.update(output[self._counts.total() :])
        changes = dict(self._bias)
        if asked.frequency_penalty or asked.presence_penalty:
            for token, count in self._counts.items():
                penalty = asked.frequency_penalty * count + asked.presence_penalty
                changes[token] = changes.get(token, 0.0) - penalty
        forbidden = self._ends if len(output) < asked.min_tokens else []
        if not changes and not forbidden:
            return logits
        adjusted = logits.to(torch.float32, copy=True)
        if changes:
            at = torch.tensor(list(changes), device=logits.device)
            adjusted[at] += torch.tensor(list(changes.values()), dtype=torch.float32, device=logits.device)
        if forbidden:
            adjusted[torch.tensor(forbidden, device=logits.device)] = -torch.inf
        return adjusted

    def _draw(self, logits: torch.Tensor) -> int:
        asked = self._sampling
        if asked.temperature == 0.0:
            return int(torch.argmax(logits))
        draw = self._random.random()
        wide = logits.to(torch.float64)
        probabilities = torch.softmax((wide - wide.max()) / asked.temperature, dim=-1)
        ordered, token_ids = torch.sort(probabilities, descending=True, stable=True)
        if asked.top_k:
            ordered = ordered[: asked.top_k] / ordered[: asked.top_k].sum()
        cumulative = torch.cumsum(ordered, dim=-1)
        kept = 1 + int(torch.searchsorted(cumulative, asked.top_p))  # the smallest head that reaches top_p
        kept = min(kept, len(ordered))
        at = int(torch.searchsorted(cumulative[:kept], draw * float(cumulative[kept - 1]), right=True))
        return int(token_ids[min(at, kept - 1)])
