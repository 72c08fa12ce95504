from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator

import pytest
from ranks.bench import Bench, make_bench


@pytest.fixture
def device_name() -> str:
    """A host device that no other test and no other process shares."""
    return f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def bench(device_name: str) -> AsyncIterator[Bench]:
    bench = await make_bench(device_name)
    yield bench
    await bench.core.close()
