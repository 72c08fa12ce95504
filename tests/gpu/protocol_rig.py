"""What the tests of the protocol on a GPU share: sizes, a prompt for each generation, and both kinds of device."""

from __future__ import annotations

import random

import pytest

from torpor.actors.config import KvCacheConfig

MIB = 1 << 20
PROMPTS = [
    [random.Random(f"gpu {number}").randrange(256) for _ in range(5 + 7 * number)] for number in range(16)
]
ON_EACH = pytest.mark.parametrize("kind", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])


def pool_bytes(kind: str) -> int:
    """On a GPU large enough that nothing else that comes and goes there hides it."""
    return 1024 * MIB if kind == "cuda" else 2 * MIB


def slack_bytes(kind: str) -> int:
    return 64 * MIB if kind == "cuda" else 0


def cache(kind: str) -> KvCacheConfig:
    return KvCacheConfig(tokens_per_block=8, gpu_bytes=pool_bytes(kind), host_bytes=64 * MIB)
