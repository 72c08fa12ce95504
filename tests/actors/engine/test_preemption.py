"""A pool too small for its requests: who gives way, and that nobody notices in the text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.engine_host import MIB, EngineHost, KvCacheConfig, Oracle, dummy_spec

from torpor.actors.engine import InvalidPrompt
from torpor.native import Device

POOL_BYTES = 128 << 10


def tiny_pool(tiny: Path, name: str, host_bytes: int, **engine: object) -> EngineHost:
    """About 28 blocks of 8 tokens."""
    kv = KvCacheConfig(tokens_per_block=8, gpu_bytes=POOL_BYTES, host_bytes=host_bytes)
    device = Device.host(f"engine-{name}", 16 * MIB, granularity_bytes=64 << 10)
    return EngineHost(dummy_spec(tiny, kv=kv, **engine), device=device)


@pytest.mark.parametrize("host_bytes", [2 * MIB, 0])
def test_preemption_changes_no_token(tiny: Path, oracle: Oracle, host_bytes: int) -> None:
    """With a host tier sequences are suspended; without one they are let go and computed again."""
    prompts = [[random.Random(f"{i}").randrange(256) for _ in range(20 + i)] for i in range(6)]
    with tiny_pool(tiny, f"preempt-{host_bytes}", host_bytes, step_tokens=64) as host:
        slots = host.engine._manager.slots  # type: ignore[attr-defined]
        assert 16 <= slots <= 32
        asked = [host.ask(prompt, max_tokens=80) for prompt in prompts]  # about 600 tokens for 224 places
        for prompt, said in zip(prompts, asked, strict=True):
            assert said.wait().tokens == oracle.greedy(prompt, 80)
        assert host.engine._loop._scheduler.preemptions > 0  # type: ignore[attr-defined]
        stats = host.engine._manager.stats()  # type: ignore[attr-defined]
        assert (stats["sequences"], stats["locked_pages"]) == (0, 0)
        assert host.engine.error() == ""


def test_a_text_that_can_never_fit_is_refused_at_the_door(tiny: Path) -> None:
    with (
        tiny_pool(tiny, "never-fits", 0) as host,
        pytest.raises(InvalidPrompt, match=r"raise kv_cache\.gpu_bytes"),
    ):
        host.ask([1] * 200, max_tokens=100)


def test_a_text_as_long_as_the_whole_pool_is_served(tiny: Path, oracle: Oracle) -> None:
    with tiny_pool(tiny, "whole-pool", 0) as host:
        places = host.engine._manager.slots * 8  # type: ignore[attr-defined]
        others = [host.ask([i] * 30, max_tokens=40) for i in range(3)]
        said = host.ask([7] * (places - 20), max_tokens=20)
        assert said.wait().tokens == oracle.greedy([7] * (places - 20), 20)
        for i, other in enumerate(others):
            assert other.wait().tokens == oracle.greedy([i] * 30, 40)
