"""Three ranks in three processes over gloo, against one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.engine_host import EngineHost, Oracle, dummy_spec, write_config
from support.engine_ranks import Ranks

from torpor.actors.engine import ModelRefused, make_engine
from torpor.actors.messages import FinishReason, TokenEvent
from torpor.native import Device, Ledger

PROMPTS = [[random.Random(f"{n}").randrange(256) for _ in range(n)] for n in (5, 33, 70)]


@pytest.fixture(scope="module")
def three(tiny: Path) -> Iterator[Ranks]:
    with Ranks(dummy_spec(tiny, tensor_parallel=3, step_tokens=16)) as ranks:
        yield ranks


def test_three_ranks_say_what_one_says(three: Ranks, oracle: Oracle) -> None:
    expected = [oracle.greedy(prompt, 12) for prompt in PROMPTS]
    assert three.call(0, "tell_all", PROMPTS, max_tokens=12) == expected
    assert three.call(0, "tell", PROMPTS[2], max_tokens=12) == (expected[2], 64)
    stats = three.call_all("stats")
    assert stats[0] == stats[1] == stats[2]
    assert stats[0]["sequences"] == 0  # also on the followers, although nothing has run since


@pytest.mark.parametrize("mode", ["none", "pinned"])
def test_all_ranks_stop_at_one_step_sleep_and_go_on(three: Ranks, oracle: Oracle, mode: str) -> None:
    before = three.call(0, "tell", PROMPTS[2], max_tokens=6)
    freed = three.call_all("sleep", ["kv_cache"], mode)
    assert all(bytes_ > 0 for bytes_ in freed)
    three.call_all("wake", ["kv_cache"])
    tokens, cached = three.call(0, "tell", PROMPTS[2], max_tokens=6)
    assert tokens == before[0] == oracle.greedy(PROMPTS[2], 6)
    assert cached == (64 if mode == "pinned" else 0)


def test_a_quiesce_while_requests_run_stops_every_rank_after_the_same_step(three: Ranks) -> None:
    three.call(0, "ask", PROMPTS[0], max_tokens=200)
    time.sleep(0.1)
    for rank in (2, 1, 0):  # the followers are asked first, and must go on until the leader stops
        three.begin(rank, "quiesce", 30.0)
    steps = [three.end(rank) for rank in range(3)]
    assert steps[0] == steps[1] == steps[2] > 0
    time.sleep(0.2)
    assert three.call(0, "quiesce", 30.0) == steps[0]
    assert three.call(0, "running") == 1
    three.call(0, "resume")
    time.sleep(0.2)  # the leader is ahead; the followers take no step before their own resume
    assert three.call(1, "quiesce", 30.0) == steps[0]
    three.call(1, "resume")
    three.call(2, "resume")
    while three.call(0, "running"):
        time.sleep(0.02)
    assert three.call_all("error") == ["", "", ""]


def test_a_follower_that_is_quiesced_alone_goes_on_after_the_time_out(three: Ranks) -> None:
    with pytest.raises(RuntimeError, match="TimeoutError: the leader did not stop"):
        three.call(1, "quiesce", 0.2)
    assert three.call(0, "tell", PROMPTS[0], max_tokens=3)


def wait_for_error(ranks: Ranks, rank: int) -> None:
    deadline = time.monotonic() + 20
    while not ranks.call(rank, "error") and time.monotonic() < deadline:
        time.sleep(0.05)


def wait_for_events(ranks: Ranks, request: str, count: int) -> list[TokenEvent]:
    """At least so many, of one token each."""
    deadline = time.monotonic() + 30
    while len(events := ranks.call(0, "events", request)) < count:
        assert time.monotonic() < deadline, events
        time.sleep(0.01)
    return list(events)


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("mode", ["none", "pinned"])
def test_frozen_requests_go_on_and_cancelled_ones_are_let_go_on_every_rank_at_rest(
    three: Ranks, oracle: Oracle, mode: str
) -> None:
    """G2, G4."""
    asked = [three.call(0, "ask", prompt, max_tokens=80, scope=f"frozen {mode}") for prompt in PROMPTS]
    for request in asked:
        wait_for_events(three, request, 3)
    three.call_all("sleep", ["kv_cache"], mode)
    before = three.call_all("stats")
    assert before[0] == before[1] == before[2]
    assert (before[0]["sequences"], before[0]["locked_pages"]) == (3, 0)
    three.call(0, "reap", True)
    three.call(0, "cancel", asked[1])
    deadline = time.monotonic() + 10
    while three.call(0, "running") > 2:
        assert time.monotonic() < deadline
    three.call(0, "reap", False)
    after = three.call_all("stats")
    assert after[0] == after[1] == after[2]
    assert after[0]["sequences"] == 2 and after[0]["held_pages"] < before[0]["held_pages"]
    three.call_all("wake", ["kv_cache"])
    for number in (0, 2):
        assert tokens_of(wait_for_events(three, asked[number], 80)) == oracle.greedy(PROMPTS[number], 80)
    assert three.call(0, "events", asked[1])[-1].finish_reason is FinishReason.ABORT
    assert three.call_all("error") == ["", "", ""]


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused_by_name(tiny: Path) -> None:
    device = Device.host("engine-divides", 1 << 22)
    spec = dummy_spec(tiny, tensor_parallel=2)
    spec = replace(spec, process_group="127.0.0.1:1", step_channel="127.0.0.1:2", channel_key=b"k")
    host = EngineHost(spec, device=device)
    with pytest.raises(ModelRefused, match="num_key_value_heads 3, which tensor_parallel 2 does not divide"):
        host.engine.load()
    assert host.ledger.tags == []


def test_more_than_one_rank_needs_its_addresses(tmp_path: Path) -> None:
    device = Device.host("engine-addresses", 1 << 22)
    with pytest.raises(ModelRefused, match="process_group, step_channel and channel_key"):
        make_engine(dummy_spec(write_config(tmp_path), tensor_parallel=3), Ledger(device), device)


def test_a_sleep_outlasts_every_time_out_and_a_leader_that_dies_ends_its_follower(tmp_path: Path) -> None:
    """F24, F29, with a generation frozen in it; and the end of the same two ranks."""
    two = write_config(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    with Ranks(dummy_spec(two, tensor_parallel=2), step_timeout_s=5.0) as ranks:
        expected = Oracle(two).greedy(PROMPTS[0], 4)
        assert ranks.call(0, "tell", PROMPTS[0], max_tokens=4)[0] == expected
        running = ranks.call(0, "ask", PROMPTS[1], max_tokens=60)
        wait_for_events(ranks, running, 3)
        ranks.call_all("sleep", ["kv_cache", "weights"], "pinned")
        frozen = len(ranks.call(0, "events", running))
        time.sleep(5.5)
        assert len(ranks.call(0, "events", running)) == frozen < 60
        ranks.call_all("wake", ["kv_cache", "weights"])
        assert tokens_of(wait_for_events(ranks, running, 60)) == Oracle(two).greedy(PROMPTS[1], 60)
        assert ranks.call(0, "tell", PROMPTS[0], max_tokens=4)[0] == expected
        ranks.processes[0].kill()
        wait_for_error(ranks, 1)
        assert "leader rank is gone" in ranks.call(1, "error")
        with pytest.raises(RuntimeError, match="leader rank is gone"):
            ranks.call(1, "quiesce", 5.0)


def test_at_last_a_rank_that_disagrees_is_found_before_the_forward_and_nobody_hangs(three: Ranks) -> None:
    """The last test of the three ranks: none of them steps afterwards."""
    three.call(0, "tell", PROMPTS[2], max_tokens=4)
    assert three.call(2, "skew") > 0
    request = three.call(0, "ask", PROMPTS[2], max_tokens=4)
    wait_for_error(three, 0)
    assert "rank 2" in three.call(0, "error")
    assert "answered 0 here and 64 on the leader" in three.call(0, "error")
    wait_for_error(three, 1)
    assert "leader rank is gone" in three.call(1, "error")
    events = three.call(0, "events", request)
    assert [event.finish_reason for event in events] == [FinishReason.ERROR]
