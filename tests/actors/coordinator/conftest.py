"""A coordinator on in-process ranks, in virtual time."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from coordinator_rig import Rig

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where the machine has such a folder.

    What ends here is a coordinator, never the machine, so that a journal that waits for a disk at each of its
    thousands of writes would be no safer, only slower: minutes on a busy disk.
    """
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="torpor-test-", dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Models chat (3 ranks) and solo (1 rank, sharing chat's first device)."""
    return Rig(tmp_path / "journal.db")
