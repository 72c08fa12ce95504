"""Logarithms of probabilities as OpenAI's answers tell them: one shape for chats, another for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torpor.actors.messages import TokenLogprob

INCOMPLETE = "\ufffd"  # the token is but a part of a character


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    shown = [{**_one(token), "top_logprobs": [_one(other) for other in token.top]} for token in tokens]
    return {"content": shown, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """offset: characters of the answer's text before these tokens."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{other.text: other.logprob for other in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _one(token: TokenLogprob) -> dict[str, Any]:
    whole = INCOMPLETE not in token.text
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode()) if whole else None,
    }
