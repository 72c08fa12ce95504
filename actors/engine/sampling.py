"""Choosing the next token. A request's draws depend on its seed and its own tokens alone, never on its neighbours."""

from __future__ import annotations

import random

import torch

from torpor.actors.engine.protocol import InvalidPrompt
from torpor.actors.messages import Sampling

MAX_STOP_STRINGS = 16


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


class Sampler:
    """One request's sampler: one uniform draw a token, turned into a token through the cumulative distribution."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self._temperature = sampling.temperature
        self._top_p = sampling.top_p
        self._random = random.Random(seed)

    def choose(self, logits: torch.Tensor) -> int:
        """logits: (vocabulary,), any float type. Greedy at temperature 0."""
        if self._temperature == 0.0:
            return int(torch.argmax(logits))
        draw = self._random.random()
        wide = logits.to(torch.float64)
        probabilities = torch.softmax((wide - wide.max()) / self._temperature, dim=-1)
        ordered, token_ids = torch.sort(probabilities, descending=True, stable=True)
        cumulative = torch.cumsum(ordered, dim=-1)
        kept = 1 + int(torch.searchsorted(cumulative, self._top_p))  # the smallest head that reaches top_p
        kept = min(kept, len(ordered))
        at = int(torch.searchsorted(cumulative[:kept], draw * float(cumulative[kept - 1]), right=True))
        return int(token_ids[min(at, kept - 1)])
