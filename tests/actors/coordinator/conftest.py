"""A coordinator on in-process ranks, in virtual time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from coordinator_rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Models chat (3 ranks) and solo (1 rank, sharing chat's first device)."""
    return Rig(tmp_path / "journal.db")
