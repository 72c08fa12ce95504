"""Events that wait for a slow reader become one."""

from __future__ import annotations

from dataclasses import replace

from torpor.actors.messages import TokenEvent


def merged(first: TokenEvent, second: TokenEvent) -> TokenEvent:
    """Both events of one request as one: text, tokens and their logprobs joined, the rest from the later."""
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
    )
