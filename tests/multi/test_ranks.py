"""Ranks in processes of their own, one a GPU over NCCL or on host devices over gloo, through sleeps of every kind.

Without Ray: what is tried is engine, ledger and process group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from multi.rig import DISCARDING, MODES, PROMPTS, SHAPE, Rig
from support.engine_host import Oracle
from support.engine_ranks import Ranks
from support.families import write_family
from support.kept_rows import keep_row

from torpor.actors.messages import FinishReason, TokenEvent

pytestmark = pytest.mark.long

RIG = Rig.of_environment()
# By how often less than the rig says: dense; windows beside full layers; states, experts and full layers.
FAMILIES = {"llama": 1, "gemma3": 10, "qwen3_next": 10}
APART = 2e-3  # of logits: sums are added up in another order
TOKENS, LONG_TOKENS = 8, 80
STEP_TIMEOUT_S = 5.0 if RIG.on_gpus else 15.0  # ranks that share two cores wait for each other
LONGER_S = 2 * STEP_TIMEOUT_S  # than NCCL's watchdog waits, too
NOTES = (
    "Cycles of sleep and wake of ranks in processes of their own, each with the driver's or kernel's word on the bytes "
    "of every device and answers as before; collectives, and whether decoding was captured."
)


@dataclass
class Told:
    """Ranks, and what they said before any sleep."""

    family: str
    ranks: Ranks
    oracle: Oracle
    before: list[list[int]]

    def says_the_same(self) -> bool:
        """Token for token, or tokens between which only rounding chooses: requests meet in other steps."""
        now = self.answers()
        return now == self.before or all(map(self.agrees, PROMPTS, now))

    def agrees(self, prompt: list[int], tokens: list[int]) -> bool:
        return len(tokens) == TOKENS and self.oracle.agrees(prompt, tokens, within=APART)

    def answers(self) -> list[list[int]]:
        answers: list[list[int]] = self.ranks.call(0, "tell_all", PROMPTS, max_tokens=TOKENS)
        return answers

    def cycle(self, tags: list[str], mode: str) -> None:
        """Down and up again, on all ranks at once."""
        ranks, discards = self.ranks, mode in DISCARDING
        free = ranks.call_all("free_bytes")
        freed = ranks.call_all("sleep", tags, mode)
        asleep = ranks.call_all("free_bytes")
        for before, after, promised in zip(free, asleep, freed, strict=True):
            assert promised > 0 and abs(after - before - promised) <= RIG.slack_bytes, (tags, mode)
        ranks.call_all("wake", tags, reload=discards and "weights" in tags)
        for before, after in zip(free, ranks.call_all("free_bytes"), strict=True):
            assert abs(after - before) <= RIG.slack_bytes, (tags, mode)


@pytest.fixture(scope="module", params=FAMILIES)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    folder = tmp_path_factory.mktemp(request.param)
    with Ranks(RIG.spec(folder, request.param), disk=folder) as ranks:
        assert ranks.call_all("value", "collectives") == [RIG.collectives] * RIG.ranks
        off = "" if RIG.on_gpus else "a host device has none"
        assert ranks.call_all("value", "graphs_off") == [off] * RIG.ranks
        said = Told(request.param, ranks, Oracle(write_family(folder, request.param, **SHAPE)), [])
        said.before = said.answers()
        assert all(map(said.agrees, PROMPTS, said.before))
        yield said
        assert ranks.call_all("error") == [""] * RIG.ranks


@pytest.mark.parametrize("what", ["kv_cache", "weights", "everything"])
def test_sleep_and_wake_many_times_in_every_mode_free_each_device_and_change_no_answer(
    told: Told, what: str
) -> None:
    """M1, M2, S1, K3, F13, F24: the sums within a replay, too."""
    tags = told.ranks.call(0, "tags") if what == "everything" else [what]
    cycles = max(RIG.cycles // FAMILIES[told.family], 1)
    began, first = time.monotonic(), told.ranks.call_all("free_bytes")
    for mode in MODES:
        replays = told.ranks.call_all("replays")
        for _ in range(cycles):
            told.cycle(tags, mode)
            assert told.says_the_same(), (what, mode)
        grown = [now - then for now, then in zip(told.ranks.call_all("replays"), replays, strict=True)]
        assert grown == [grown[0]] * RIG.ranks and (grown[0] > 0) == RIG.on_gpus, "captured decoding"
    last = told.ranks.call_all("free_bytes")
    assert all(abs(now - then) <= RIG.slack_bytes for now, then in zip(last, first, strict=True))
    row = {"device": RIG.kind, "ranks": RIG.ranks, "family": told.family, "what": what}
    counted = {"cycles_of_each_mode": cycles, "modes": list(MODES), "collectives": RIG.collectives}
    seconds = {"seconds": round(time.monotonic() - began, 1), "graphs": RIG.on_gpus}
    keep_row("multi_cycles", ("device", "ranks", "family", "what"), row | counted | seconds, NOTES)


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def until_said(ranks: Ranks, request: str, tokens: int, timeout_s: float = 60.0) -> list[TokenEvent]:
    """At least so many tokens, or an end."""
    deadline = time.monotonic() + timeout_s
    while True:
        events: list[TokenEvent] = ranks.call(0, "events", request)
        if len(tokens_of(events)) >= tokens or (events and events[-1].finish_reason):
            return events
        assert time.monotonic() < deadline, events
        time.sleep(0.01)


def test_frozen_texts_outlast_every_time_out_and_a_rank_that_dies_ends_the_others_in_words(
    tmp_path: Path,
) -> None:
    """F24, F29, G2, M6: what the watchdog of a process group must not take for a hang, and what is one."""
    with Ranks(RIG.spec(tmp_path, "llama"), step_timeout_s=STEP_TIMEOUT_S) as ranks:
        oracle = Oracle(write_family(tmp_path, "llama", **SHAPE))
        running = [ranks.call(0, "ask", prompt, max_tokens=LONG_TOKENS) for prompt in PROMPTS]
        for request in running:
            until_said(ranks, request, 3)
        tags = ranks.call(0, "tags")
        for rank in range(RIG.ranks):  # a follower stops where the leader does
            ranks.begin(rank, "sleep", tags, "pinned")
        assert all(ranks.end(rank) > 0 for rank in range(RIG.ranks))
        frozen = [len(tokens_of(ranks.call(0, "events", request))) for request in running]
        assert max(frozen) < LONG_TOKENS, "all had ended: nothing was frozen"
        time.sleep(LONGER_S)
        assert [len(tokens_of(ranks.call(0, "events", request))) for request in running] == frozen
        ranks.call_all("wake", tags)
        for prompt, request in zip(PROMPTS, running, strict=True):
            tokens = tokens_of(until_said(ranks, request, LONG_TOKENS))
            assert len(tokens) == LONG_TOKENS and oracle.agrees(prompt, tokens, within=APART)
        assert ranks.call_all("error") == [""] * RIG.ranks

        request = ranks.call(0, "ask", PROMPTS[1], max_tokens=400, scope="cut off")
        until_said(ranks, request, 3)
        ranks.processes[-1].kill()
        last = until_said(ranks, request, 400, timeout_s=60.0)[-1]
        assert last.finish_reason is FinishReason.ERROR and last.error
        assert "step" in ranks.call(0, "error")
