"""Batched, chunked, paged generation against the uncached full forward."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from support.engine_host import EngineHost, Oracle, dummy_spec

from torpor.actors.engine import InvalidPrompt
from torpor.actors.messages import FinishReason, GenerateRequest, Sampling
from torpor.actors.ports import QueueFull


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{length}/{i}").randrange(256) for i in range(length)]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 100])
def test_greedy_text_is_token_exact_whatever_the_chunks(
    host: EngineHost, oracle: Oracle, length: int
) -> None:
    said = host.tell(prompt(length), max_tokens=12)
    assert said.tokens == oracle.greedy(prompt(length), 12)
    assert said.last.finish_reason is FinishReason.LENGTH
    assert (said.last.prompt_tokens, said.last.completion_tokens) == (length, 12)


def test_logits_over_pages_equal_the_full_forward_within_1e_5(host: EngineHost, oracle: Oracle) -> None:
    from torpor.actors.engine.engine import TransformersEngine
    from torpor.actors.engine.plan import Chunk

    host.engine.quiesce(10)
    engine = host.engine
    assert isinstance(engine, TransformersEngine) and engine._book is not None
    book, runner, tokens = engine._book, engine._loop._runner, prompt(61)  # type: ignore[union-attr]
    book.create(10**6, "", tokens)
    assert book.resume(10**6) and book.resize(10**6, len(tokens))
    got = []
    for start, end in [
        (0, 13),
        (13, 14),
        (14, 40),
        (40, 60),
        (60, 61),
    ]:  # prefill and decode, on and off borders
        rows = runner.forward([Chunk(10**6, start, tuple(tokens[start:end]), True)])
        got.append((end - 1, rows[0]))
    book.close(10**6)
    host.engine.resume()
    expected = oracle.logits(tokens)
    for at, row in got:
        torch.testing.assert_close(row, expected[at], atol=1e-5, rtol=1e-5)


def test_eight_requests_of_mixed_lengths_at_once_are_each_token_exact(
    host: EngineHost, oracle: Oracle
) -> None:
    lengths = [1, 3, 8, 15, 16, 33, 64, 90]
    asked = [host.ask(prompt(n, seed=n), max_tokens=10 + n % 5) for n in lengths]
    for n, said in zip(lengths, asked, strict=True):
        assert said.wait().tokens == oracle.greedy(prompt(n, seed=n), 10 + n % 5), n
    assert host.engine.running() == 0


def test_memory_that_was_never_written_is_never_read(host: EngineHost, oracle: Oracle) -> None:
    """Fresh physical memory may hold anything, also what is no number."""
    pages = host.engine._loop._runner._pages  # type: ignore[attr-defined]
    for pool in (*pages.keys.values(), *pages.values.values()):
        pool.fill_(float("nan"))
    host.engine.quiesce(10)
    prompts = [prompt(n, seed=n) for n in (1, 2, 3, 1, 5)]  # whose padded decodes share a batch
    asked = [host.ask(one, max_tokens=6) for one in prompts]
    host.engine.resume()
    for one, said in zip(prompts, asked, strict=True):
        assert said.wait().tokens == oracle.greedy(one, 6)


def test_a_known_prefix_is_reused_in_whole_blocks_and_within_its_scope_only(
    host: EngineHost, oracle: Oracle
) -> None:
    first = host.tell(prompt(50), max_tokens=4)
    again = host.tell(prompt(50), max_tokens=4)
    longer = host.tell([*prompt(50)[:30], 1, 2, 3], max_tokens=4)
    other = host.tell(prompt(50), max_tokens=4, scope="another tenant")
    assert (first.cached, again.cached, longer.cached, other.cached) == (0, 48, 24, 0)
    assert first.tokens == again.tokens == other.tokens
    assert longer.tokens == oracle.greedy([*prompt(50)[:30], 1, 2, 3], 4)


def test_what_a_request_generated_is_a_prefix_of_the_next_turn(host: EngineHost) -> None:
    first = host.tell(prompt(20), max_tokens=21)
    second = host.tell(prompt(20) + first.tokens + [5], max_tokens=2)
    assert second.cached == 40  # of 41: the newest token's K and V were never computed


def test_seeded_samples_are_the_same_alone_and_in_a_crowd(host: EngineHost) -> None:
    options = {"max_tokens": 20, "temperature": 0.9, "top_p": 0.95}
    alone = host.tell(prompt(12), seed=7, **options)
    crowd = [host.ask(prompt(12 + i), seed=i, **options) for i in range(6)]
    crowded = host.ask(prompt(12), seed=7, **options)
    assert crowded.wait().tokens == alone.tokens
    other = host.tell(prompt(12), seed=8, **options)
    assert other.tokens != alone.tokens
    for said in crowd:
        said.wait()


def test_unseeded_samples_differ(host: EngineHost) -> None:
    texts = {tuple(host.tell(prompt(12), max_tokens=20, temperature=1.0).tokens) for _ in range(3)}
    assert len(texts) == 3


def test_a_cancelled_request_ends_with_abort_and_frees_its_place(host: EngineHost) -> None:
    said = host.ask(prompt(10), max_tokens=480)
    while not said.events:
        time.sleep(0.001)
    host.engine.cancel("request-1")
    host.engine.cancel("no such request")
    assert said.wait().last.finish_reason is FinishReason.ABORT
    assert 0 < said.last.completion_tokens < 480
    assert host.engine.running() == 0 or wait_until_idle(host)
    assert host.tell(prompt(10), max_tokens=3).last.finish_reason is FinishReason.LENGTH


def wait_until_idle(host: EngineHost) -> bool:
    deadline = time.monotonic() + 10
    while host.engine.running() and time.monotonic() < deadline:
        time.sleep(0.001)
    return host.engine.running() == 0


def test_a_request_beyond_the_waiting_bound_is_refused_and_the_others_are_served(tiny: Path) -> None:
    with EngineHost(dummy_spec(tiny, max_running=1, max_waiting=2)) as host:
        host.engine.quiesce(10)
        kept = [host.ask(prompt(4), max_tokens=2) for _ in range(2)]
        assert (host.engine.running(), host.engine.waiting()) == (2, 2)
        with pytest.raises(QueueFull, match="try again"):
            host.ask(prompt(4), max_tokens=2)
        host.engine.resume()
        assert all(said.wait().last.finish_reason is FinishReason.LENGTH for said in kept)


@pytest.mark.parametrize(
    ("sampling", "tokens", "says"),
    [
        ({}, [], "empty"),
        ({}, [1, 320], "vocabulary of 320"),
        ({}, [1] * 512, "exceed the 512 tokens"),
        ({"max_tokens": 500}, [1] * 20, "max_tokens 500 exceed"),
        ({"max_tokens": 0}, [1], "at least 1"),
        ({"temperature": -1.0}, [1], "temperature"),
        ({"top_p": 0.0}, [1], "top_p"),
        ({"stop": ("",)}, [1], "stop string is empty"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_what_to_do(
    host: EngineHost, sampling: dict[str, object], tokens: list[int], says: str
) -> None:
    with pytest.raises(InvalidPrompt, match=says):
        host.ask(tokens, **sampling)
    assert host.engine.running() == 0


def test_a_request_gives_exactly_one_kind_of_prompt(host: EngineHost) -> None:
    with pytest.raises(InvalidPrompt, match="exactly one"):
        host.engine.prepare(GenerateRequest(id="x", prompt="a", token_ids=(1,), sampling=Sampling()))


def test_without_max_tokens_a_request_runs_to_the_end_of_the_context(tiny: Path) -> None:
    with EngineHost(dummy_spec(tiny, max_context_tokens=64)) as host:
        said = host.tell(prompt(40))
    assert (said.last.finish_reason, said.last.completion_tokens) == (FinishReason.LENGTH, 24)


def test_an_eos_token_ends_the_text_and_is_not_part_of_it(tmp_path: Path, oracle: Oracle) -> None:
    from support.engine_host import write_config

    expected = oracle.greedy(prompt(9), 12)
    eos = expected[5]
    with EngineHost(dummy_spec(write_config(tmp_path, eos_token_id=eos))) as host:
        said = host.tell(prompt(9), max_tokens=12)
    stop = expected.index(eos)
    assert said.tokens == expected[: stop + 1]
    assert said.last.finish_reason is FinishReason.STOP
    assert said.text == bytes(t for t in expected[:stop] if t < 256).decode(errors="replace")


def test_a_request_whose_step_fails_hears_of_it_and_so_does_the_next(host: EngineHost) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the device went away")

    host.engine._loop._runner.forward = broken  # type: ignore[attr-defined]
    said = host.tell(prompt(5), max_tokens=3)
    assert said.last.finish_reason is FinishReason.ERROR
    assert "the device went away" in said.last.error
    assert "the device went away" in host.engine.error()
    with pytest.raises(Exception, match="the device went away"):
        host.ask(prompt(5))
    with pytest.raises(Exception, match="the device went away"):
        host.engine.quiesce(5)
    host.engine._loop._error = ""  # type: ignore[attr-defined]  # the fixture expects none
