"""An engine through sleeps and wakes of its ledger, in every mode: what survives, what is forgotten, what stays put."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from support.engine_host import EngineHost, Oracle

from torpor.actors.messages import FinishReason

PROMPT = [random.Random(i).randrange(256) for i in range(50)]
PRESERVING, DISCARDING = ("cpu", "pinned"), ("none", "memset")


def module(host: EngineHost) -> torch.nn.Module:
    return host.engine._model.module  # type: ignore[attr-defined, no-any-return]


def addresses(host: EngineHost) -> dict[str, int]:
    pages = host.engine._loop._runner._pages  # type: ignore[attr-defined]
    tensors = [*module(host).named_parameters(), *module(host).named_buffers()]
    found = {name: tensor.data_ptr() for name, tensor in tensors}
    return found | {f"k{i}": keys.data_ptr() for i, keys in pages.keys.items()}


def logits(host: EngineHost, tokens: list[int]) -> torch.Tensor:
    """Of the last token, computed over pages that are given back at once."""
    from torpor.actors.engine.plan import Chunk

    book, runner = host.engine._book, host.engine._loop._runner  # type: ignore[attr-defined]
    book.create(10**6, "a scope of its own", tokens)
    assert book.resume(10**6) and book.resize(10**6, len(tokens))
    row = runner.forward([Chunk(10**6, 0, tuple(tokens), True)])[0]
    book.close(10**6)
    return row


@pytest.mark.parametrize("mode", [*PRESERVING, *DISCARDING])
def test_a_sleep_of_the_kv_cache_changes_no_answer_and_keeps_prefixes_if_it_preserves(
    host: EngineHost, oracle: Oracle, mode: str
) -> None:
    """K1, K3, F11, S1."""
    before, place = host.tell(PROMPT, max_tokens=8), addresses(host)
    free = host.device.memory_info()[0]
    freed = host.sleep(["kv_cache"], mode)
    assert host.device.memory_info()[0] == free + freed
    assert freed >= host.spec.model.kv_cache.gpu_bytes
    host.wake(["kv_cache"])
    after = host.tell(PROMPT, max_tokens=8)
    assert after.tokens == before.tokens == oracle.greedy(PROMPT, 8)
    assert after.cached == (48 if mode in PRESERVING else 0)
    assert addresses(host) == place


@pytest.mark.parametrize("mode", PRESERVING)
def test_a_preserving_sleep_of_everything_gives_back_the_same_logits(host: EngineHost, mode: str) -> None:
    """S1, K3, F13: bit for bit, as the same bytes lie at the same places."""
    host.tell(PROMPT, max_tokens=8)
    host.engine.quiesce(10)
    before, place = logits(host, PROMPT), addresses(host)
    host.engine.resume()
    host.sleep(["kv_cache", "weights"], mode)
    assert host.ledger.parked_tags == ["kv_cache", "weights"]
    host.wake(["kv_cache", "weights"])
    assert addresses(host) == place
    host.engine.quiesce(10)
    assert torch.equal(logits(host, PROMPT), before)
    host.engine.resume()
    assert host.tell(PROMPT, max_tokens=8).cached == 48


@pytest.mark.parametrize("mode", DISCARDING)
def test_buffers_survive_a_sleep_that_discards_the_weights(host: EngineHost, mode: str) -> None:
    """S3, F13: no checkpoint brings rotary tables back."""
    buffers = {name: tensor.clone() for name, tensor in module(host).named_buffers()}
    saved = {name: tensor.detach().clone() for name, tensor in module(host).named_parameters()}
    assert buffers
    before = host.tell(PROMPT, max_tokens=8)
    host.sleep(["weights", "kv_cache"], mode)
    host.wake(["weights", "kv_cache"])
    for name, tensor in module(host).named_buffers():
        assert torch.equal(tensor, buffers[name]), name
    with torch.no_grad():
        for name, tensor in module(host).named_parameters():
            if mode == "memset":
                assert not tensor.any(), name
            tensor.copy_(saved[name])  # what a reload will do
    assert host.tell(PROMPT, max_tokens=8).tokens == before.tokens


def test_twenty_cycles_leave_the_answer_and_the_free_bytes_where_they_were(host: EngineHost) -> None:
    """M2, C1."""
    before = host.tell(PROMPT, max_tokens=8)
    free = host.device.memory_info()[0]
    for mode in [*PRESERVING, *DISCARDING] * 5:
        host.sleep(["kv_cache"], mode)
        host.wake(["kv_cache"])
        assert host.tell(PROMPT, max_tokens=8).tokens == before.tokens
    assert host.device.memory_info()[0] == free


def test_a_request_that_comes_while_the_engine_is_quiesced_is_served_after_resume(
    host: EngineHost, oracle: Oracle
) -> None:
    host.sleep(["kv_cache"], "none")
    said = host.ask(PROMPT, max_tokens=4)
    assert not said.done.wait(0.2)
    assert (host.engine.running(), host.engine.waiting()) == (1, 1)
    host.wake(["kv_cache"])
    assert said.wait().tokens == oracle.greedy(PROMPT, 4)


def test_a_quiesce_between_two_tokens_loses_none(host: EngineHost, oracle: Oracle) -> None:
    said = host.ask(PROMPT, max_tokens=60)
    steps = set()
    while not said.done.is_set():
        steps.add(host.engine.quiesce(10))
        assert host.engine.quiesce(10) in steps  # idempotent
        seen = len(said.events)
        assert len(said.events) == seen
        host.engine.resume()
        said.done.wait(0.005)
    assert len(steps) > 3
    assert said.tokens == oracle.greedy(PROMPT, 60)


def test_a_step_that_does_not_end_in_time_makes_quiesce_give_up_and_go_on(host: EngineHost) -> None:
    entered, go = threading.Event(), threading.Event()
    runner = host.engine._loop._runner  # type: ignore[attr-defined]
    forward = runner.forward

    def slow(chunks: object) -> object:
        entered.set()
        go.wait(10)
        return forward(chunks)

    runner.forward = slow
    said = host.ask(PROMPT, max_tokens=3)
    assert entered.wait(10)
    with pytest.raises(TimeoutError, match=r"did not end within 0\.1 s"):
        host.engine.quiesce(0.1)
    go.set()
    assert said.wait().last.finish_reason is FinishReason.LENGTH


def test_closing_the_engine_ends_the_requests_that_still_run(tiny: object) -> None:
    from support.engine_host import dummy_spec

    with EngineHost(dummy_spec(tiny)) as host:  # type: ignore[arg-type]
        said = host.ask(PROMPT, max_tokens=400)
    assert said.wait().last.finish_reason is FinishReason.ERROR
    assert "closed" in said.last.error
