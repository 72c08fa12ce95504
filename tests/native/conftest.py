"""A fresh host device for each test: its name is its own, so that nothing is shared by accident."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count

import pytest

from torpor.native import Device

MIB = 1 << 20


@pytest.fixture
def make_device(request: pytest.FixtureRequest) -> Callable[..., Device]:
    numbers = count()

    def make(capacity_bytes: int = 64 * MIB, granularity_bytes: int = 2 * MIB) -> Device:
        name = f"test-{os.getpid()}-{id(request)}-{next(numbers)}"
        return Device.host(name, capacity_bytes, granularity_bytes)

    return make


@pytest.fixture
def device(make_device: Callable[..., Device]) -> Device:
    return make_device()
