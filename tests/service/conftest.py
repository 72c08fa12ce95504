"""The front door over an in-memory cluster: the real coordinator and journal, ranks and model in this process."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from service_fakes import MemoryInference
from service_rig import Rig, make_rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """One model, `chat`, on one rank."""
    async with make_rig(tmp_path, {"chat": 1}) as made:
        yield made


@pytest.fixture
async def wide_rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Two models, `chat` on three ranks and `draft` on one."""
    async with make_rig(tmp_path, {"chat": 3, "draft": 1}) as made:
        yield made


@pytest.fixture
def http(rig: Rig) -> httpx.AsyncClient:
    return rig.http


@pytest.fixture
def inference(rig: Rig) -> MemoryInference:
    return rig.inference
