"""Fixtures of the engine's tests: tiny random models in process, and the small real one once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engine_host import EngineHost, Oracle, dummy_spec, write_config


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For the smallest models, whose operations two threads only make slower, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a tiny random Llama."""
    return write_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def oracle(tiny: Path) -> Oracle:
    return Oracle(tiny)


@pytest.fixture
def host(tiny: Path) -> Iterator[EngineHost]:
    """An engine with chunks of 16 prefill tokens."""
    with EngineHost(dummy_spec(tiny, step_tokens=16)) as host:
        yield host
        assert host.engine.error() == ""
