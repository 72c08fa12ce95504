"""Crowds of thirty-two streams over every family: answers right, no page left behind (support/crowds.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.crowds import crowd, keep
from support.families import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")

LONG_S = 75.0  # eight families: ten minutes


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite_hybrid"])
async def test_a_crowd_gets_right_answers_and_leaves_no_page_behind(family: str, tmp_path: Path) -> None:
    """G4, K11: layers of all kinds."""
    await crowd(family, tmp_path, 0.0)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_crowd_gets_right_answers_for_minutes(family: str, tmp_path: Path) -> None:
    keep(family, LONG_S, await crowd(family, tmp_path, LONG_S))
