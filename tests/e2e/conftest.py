"""A real `torpor serve` with the real small model, once for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.serving import Server, start_server, stop_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start_server(tmp_path_factory.mktemp("serve"))
    yield running
    stop_server(running)
