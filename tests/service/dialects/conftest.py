"""What real clients call, as data, for the tests beside it; journals in memory."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where the machine has such a folder: no machine dies here, and hundreds of operations are written."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="torpor-test-", dir=MEMORY) as folder:
        yield Path(folder)
