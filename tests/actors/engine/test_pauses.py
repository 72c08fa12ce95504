"""Pauses and resets of the default engine: what is kept goes on as if nothing had been, and no prefix is served."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.engine_host import dummy_spec
from support.engine_rank import engine_rank

from torpor.actors.messages import DrainMode, DrainSpec, GateReason, Kind

FREEZE = DrainSpec(DrainMode.FREEZE)
PROMPT = list(range(3, 40))


async def test_what_a_pause_keeps_says_the_same_also_when_prefixes_are_forgotten_meanwhile(
    tiny: Path,
) -> None:
    """G2, F12: it is computed anew from what it has said."""
    async with engine_rank(dummy_spec(tiny, step_tokens=16)) as rank:
        await rank.ask("plain", PROMPT, max_tokens=48)
        await rank.ended("plain")
        for name, forgets in (("kept", False), ("forgotten", True)):
            await rank.ask(name, PROMPT, max_tokens=48)
            await rank.until(lambda name=name: len(rank.tokens(name)) > 4)
            await rank.operate(Kind.PAUSE, drain=FREEZE)
            said, status = len(rank.tokens(name)), await rank.core.status()
            assert (status.gate_reason, status.frozen_requests) == (GateReason.PAUSED, 1)
            assert status.parked_tags == ()
            if forgets:
                await rank.operate(Kind.RESET, drain=FREEZE)
            await asyncio.sleep(0.05)
            assert len(rank.tokens(name)) == said < 48
            await rank.operate(Kind.UNPAUSE)
            await rank.ended(name)
            assert rank.tokens(name) == rank.tokens("plain")


async def test_after_a_reset_no_token_of_a_prompt_is_found_in_the_cache(tiny: Path) -> None:
    """F12, K1."""
    async with engine_rank(dummy_spec(tiny)) as rank:
        cached = []
        for name in ("first", "second", "third"):
            await rank.ask(name, PROMPT, max_tokens=2)
            await rank.ended(name)
            cached.append(rank.last(name).cached_tokens)
            if name == "second":
                await rank.operate(Kind.RESET, drain=DrainSpec(DrainMode.IF_IDLE))
        assert cached[0] == cached[2] == 0 < cached[1]
        assert (await rank.core.status()).gate_open
