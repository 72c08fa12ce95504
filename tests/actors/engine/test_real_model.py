"""The small real model, loaded once: text that a person can judge, against transformers' own generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_host import MIB, EngineHost, real_spec, small_model

from torpor.actors.engine import ModelRefused

QUESTION = ({"role": "user", "content": "What is the capital of France?"},)
PROMPTS = ["The first three planets from the sun are", "def fibonacci(n):", "Grüße aus Köln 🙂 und"]


@pytest.fixture(scope="module")
def real() -> Iterator[EngineHost]:
    with EngineHost(real_spec(small_model()), capacity_bytes=1024 * MIB) as host:
        yield host
        assert host.engine.error() == ""


def uncached(host: EngineHost, tokens: list[int], count: int) -> list[int]:
    """Greedy by full forwards through transformers' own attention, on the very weights that the engine uses."""
    module: Any = host.engine._model.module  # type: ignore[attr-defined]
    module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            for _ in range(count):
                logits = module(torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits
                tokens = [*tokens, int(logits[0, -1].argmax())]
    finally:
        module.set_attn_implementation("torpor_paged")
    return tokens[-count:]


def test_it_knows_the_capital_of_france(real: EngineHost) -> None:
    said = real.tell(messages=QUESTION, max_tokens=30)
    assert "Paris" in said.text
    assert said.last.finish_reason == "stop"  # its end-of-turn token, which is no part of the text
    assert "<|" not in said.text


def test_its_greedy_text_is_token_exact_also_in_a_batch(real: EngineHost) -> None:
    asked = [real.ask(prompt, max_tokens=12) for prompt in PROMPTS]
    texts = [said.wait().tokens for said in asked]
    real.engine.quiesce(10)
    tokenizer = real.engine._model.tokenizer  # type: ignore[attr-defined]
    expected = [uncached(real, tokenizer.encode(prompt), 12) for prompt in PROMPTS]
    real.engine.resume()
    assert texts == expected


@pytest.mark.parametrize(("mode", "cached"), [("pinned", 32), ("none", 0)])
def test_it_gives_the_same_answer_after_a_sleep(real: EngineHost, mode: str, cached: int) -> None:
    """K1, K3, F11: the KV cache in this mode, the weights kept."""
    before = real.tell(messages=QUESTION, max_tokens=30)
    free = real.device.memory_info()[0]
    real.engine.quiesce(10)
    report = real._transact("sleep", ["kv_cache", "weights"], {"kv_cache": mode, "weights": "pinned"})
    assert real.device.memory_info()[0] - free == report["freed_bytes"] >= 256 * MIB + 500_000_000
    real.wake(["kv_cache", "weights"])
    after = real.tell(messages=QUESTION, max_tokens=30)
    assert after.tokens == before.tokens
    assert after.cached == cached


def test_half_a_file_is_refused(tmp_path: Path) -> None:
    """A download that broke off."""
    half = tmp_path / "half.gguf"
    with small_model().open("rb") as whole:
        half.write_bytes(whole.read(20_000_000))
    host = EngineHost(real_spec(half))
    with pytest.raises(ModelRefused, match=r"half\.gguf cannot be read"):
        host.engine.load()
    assert host.ledger.tags == []


def test_characters_of_several_tokens_reach_the_reader_whole(real: EngineHost) -> None:
    tokenizer = real.engine._model.tokenizer  # type: ignore[attr-defined]
    said = real.tell("Emoji list: 🙂 🎉 🚀 🙂 🎉 🚀 🙂 🎉", max_tokens=24)
    assert said.text == tokenizer.decode(said.tokens)
    assert all("\ufffd" not in event.text for event in said.events[:-1])
