"""A front end waits for a model's gate to change, without asking again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torpor.actors.coordinator.feed import Feed
from torpor.actors.messages import ModelView

LOOK_S = 0.25  # between looks at what changes without a word


async def watch(
    view: Callable[[], ModelView], seen: ModelView | None, timeout_s: float, feed: Feed
) -> ModelView:
    """The view once it is another one than `seen`, for front ends, or the time is up."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + timeout_s
    while True:
        now = view()
        left_s = ends_at - loop.time()
        if seen is None or left_s <= 0 or not same_outside(now, seen):
            return now
        await feed.changed(min(left_s, LOOK_S))


def same_outside(one: ModelView, other: ModelView) -> bool:
    """Whether a front end would do the same at both."""
    return (one.state, one.gate_open, one.gate_reason, one.hold) == (
        other.state,
        other.gate_open,
        other.gate_reason,
        other.hold,
    )
