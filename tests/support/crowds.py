"""Thirty-two streams at once over a pool that is too small for them, with shared prefixes and clients that go away.

    PYTHONPATH=build/py:tests python -m support.crowds [--seconds 600] [--family llama] [--family …]

All families in turn where none is named, each for so long; what they met is kept in tests/bench/results/streams.json.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
import uuid
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from support.engine_host import Oracle
from support.engine_rank import FRONT_END, EngineRank, engine_rank
from support.families import FAMILIES, family_spec, write_family
from support.kept_rows import keep_row

from torpor.actors.config import MIB, KvCacheConfig, RankSpec
from torpor.actors.messages import FinishReason
from torpor.native import Device

STREAMS = 32
LEAST_TURNS = 2
CONTEXT = 152  # just above the longest text
ROUNDING = 1e-3  # of logits of about 20: two tokens so near to each other may change places with the batch
SHARED = [[random.Random(f"shared {i}/{j}").randrange(256) for j in range(48 + 4 * i)] for i in range(4)]
NOTES = (
    f"{STREAMS} streams at once over a KV pool that holds some of them, a third of the clients going away in the middle: "
    "every token the likeliest of the uncached full forward, no page left behind."
)


@dataclass
class Tally:
    answered: int = 0
    went_away: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


def crowded(folder: Path, family: str) -> RankSpec:
    """Pools of 256 KiB in all; short texts, so that states and pages run out at about the same number of them."""
    spec = family_spec(folder, family, step_tokens=32)
    kv = KvCacheConfig(tokens_per_block=8, gpu_bytes=256 << 10, host_bytes=256 << 10)
    write_family(folder, family, max_position_embeddings=CONTEXT)
    return replace(spec, model=replace(spec.model, kv_cache=kv))


def small_device(_: RankSpec) -> Device:
    return Device.host(f"streams-{uuid.uuid4().hex[:12]}", 64 * MIB, granularity_bytes=16 << 10)


async def client(rank: EngineRank, number: int, oracle: Oracle, until: float, tally: Tally) -> None:
    """Ask, read to the end or go away in the middle, check what was said, and again."""
    wishes = random.Random(f"client {number}")
    turn = 0
    while turn < LEAST_TURNS or time.monotonic() < until:
        name, turn = f"client-{number}-{turn}", turn + 1
        tail = [wishes.randrange(256) for _ in range(wishes.randrange(1, 25))]
        prompt = wishes.choice(SHARED) + tail
        await rank.ask(name, prompt, wishes.choice(["", "a tenant"]), max_tokens=wishes.randrange(40, 65))
        leaves = wishes.random() < 1 / 3
        if leaves:
            await rank.until(partial(_has_said, rank, name, wishes.randrange(8)))
            await rank.core.cancel(FRONT_END, [name])
        await rank.ended(name)
        said, tokens = rank.last(name), rank.tokens(name)
        ends = {FinishReason.LENGTH, FinishReason.ABORT} if leaves else {FinishReason.LENGTH}
        if said.finish_reason not in ends or (tokens and not oracle.agrees(prompt, tokens, ROUNDING)):
            tally.wrong.append(f"{name}: {prompt} → {tokens}, {said}")
        tally.answered += not leaves
        tally.went_away += said.finish_reason is FinishReason.ABORT
        tally.tokens += len(tokens)
        del rank.events[name]


def _has_said(rank: EngineRank, name: str, tokens: int) -> bool:
    """So many tokens, or all."""
    over = bool(rank.events[name]) and rank.last(name).finish_reason is not None
    return over or len(rank.tokens(name)) >= tokens


async def crowd(family: str, folder: Path, seconds: float) -> dict[str, object]:
    oracle = Oracle(write_family(folder, family, max_position_embeddings=CONTEXT))
    tally = Tally()
    async with engine_rank(crowded(folder, family), make_device=small_device) as rank:
        free_bytes, empty = rank.free_bytes(), rank.stats()
        until = time.monotonic() + seconds
        await asyncio.gather(*(client(rank, i, oracle, until, tally) for i in range(STREAMS)))
        assert not tally.wrong, (len(tally.wrong), tally.wrong[0])
        manager, loop = rank.engine._manager, rank.engine._loop
        assert manager is not None and loop is not None
        stats = rank.stats()
        assert (stats["sequences"], stats["locked_pages"], stats["held_pages"]) == (0, 0, 0)
        manager.forget_prefixes()
        left = rank.stats()
        assert left["free_slots"] == left["slots"] == empty["slots"]
        assert (left["droppable_pages"], left["host_pages"], left["prefix_tokens"]) == (0, 0, 0)
        assert rank.free_bytes() == free_bytes
        preemptions = loop._scheduler.preemptions  # type: ignore[union-attr]
        row = {
            "answered": tally.answered,
            "went_away": tally.went_away,
            "tokens": tally.tokens,
            "preemptions": preemptions,
            "reused_prefix_tokens": stats["hits_tokens"],
        }
        assert all(row.values()), f"something never happened: {row}"
    return row


def keep(family: str, seconds: float, row: dict[str, object]) -> Path:
    return keep_row("streams", ("family",), {"family": family, "seconds": seconds} | row, NOTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of each family")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="may be repeated; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more only make the smallest models slower
    for family in options.family or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            row = asyncio.run(crowd(family, Path(folder), options.seconds))
        print(family, row, "kept in", keep(family, options.seconds, row), flush=True)


if __name__ == "__main__":
    main()
