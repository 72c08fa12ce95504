"""Every family through every restore mode and every drain mode: nothing is lost, nothing said otherwise, nothing moved.

Weights that woke without contents are written again from a safetensors folder, as `contents_undefined` asks for, or
read again from their source within the wake.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_host import EngineHost, Oracle
from support.engine_rank import engine_rank
from support.families import FAMILIES, family_spec, write_family
from support.family_sleeps import DRAINS, KNOWN, RESTORES, REUSED_TOKENS, TAGS, Case, FamilySleeps, probe
from support.kept_rows import keep_row

from torpor.actors.config import NodeBudget

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = [Case(restore, drain) for restore in RESTORES for drain in DRAINS]
NOTES = (
    "Each family's small random model, one rank on a host device, float32: for each restore mode of kv_cache and "
    "weights and each drain mode the seconds of a case: greedy answers before, across and after the sleep, token for "
    "token those of the uncached full forward; logits, buffers and addresses before and after bit for bit the same."
)


def pairs(family: str) -> list[Case]:
    """One case a restore mode: over all families every pair of family, restore mode and drain mode is met."""
    first = FAMILIES.index(family)
    return [Case(restore, DRAINS[(first + i) % len(DRAINS)]) for i, restore in enumerate(RESTORES)]


async def run(family: str, cases: Sequence[Case], folder: Path) -> tuple[dict[str, Any], FamilySleeps]:
    """One rank through all of the cases, one after the other."""
    oracle = Oracle(write_family(folder, family))
    checkpoint = folder / "roots" / family
    oracle.model.save_pretrained(checkpoint)
    spec = family_spec(folder, family)
    spec = replace(spec, weights_roots=(str(checkpoint.parent),), node=NodeBudget(disk_path=str(folder)))
    seconds: dict[str, Any] = {}
    async with engine_rank(spec) as rank:
        sleeps = FamilySleeps(rank, oracle, checkpoint)
        for case in cases:
            began = time.perf_counter()
            await sleeps.run(case)
            seconds.setdefault(case.restore, {})[str(case.drain)] = round(time.perf_counter() - began, 2)
    return seconds, sleeps


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_pair_of_family_restore_mode_and_drain_mode(family: str, tmp_path: Path) -> None:
    """G2, K1, K3, K11, C9, C10, S1, S3, F13, F14, F28."""
    await run(family, pairs(family), tmp_path)


def test_the_cases_meet_every_pair() -> None:
    met = {(family, case.restore, case.drain) for family in FAMILIES for case in pairs(family)}
    assert len({(family, restore) for family, restore, _ in met}) == len(FAMILIES) * len(RESTORES)
    assert len({(family, drain) for family, _, drain in met}) == len(FAMILIES) * len(DRAINS)
    assert len({(restore, drain) for _, restore, drain in met}) == len(RESTORES) * len(DRAINS)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_through_every_restore_mode_and_every_drain_mode(
    family: str, tmp_path: Path
) -> None:
    seconds, sleeps = await run(family, ALL, tmp_path)
    parameters = sum(parameter.numel() for parameter in sleeps.oracle.model.parameters())
    row = {
        "family": family,
        "parameters": parameters,
        "cases": len(ALL),
        "compared_tokens": sleeps.compared_tokens,
        "seconds": seconds,
    }
    keep_row("families", ("family",), row, NOTES)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_gives_the_same_logits_and_tokens_after_a_sleep(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """F13: of the oracle these texts are not, as rounding depends on the batch; of themselves they are."""
    with EngineHost(family_spec(tmp_path, family, dtype=dtype), disk=tmp_path) as host:
        first = host.tell(KNOWN, max_tokens=20)
        before = probe(host.engine)
        assert before.dtype == getattr(torch, dtype) and bool(before.isfinite().all())
        for mode in ("pinned", "disk"):
            host.sleep(TAGS, mode)
            host.wake(TAGS)
            assert torch.equal(probe(host.engine), before)
        again = host.tell(KNOWN, max_tokens=20)
        assert again.cached == REUSED_TOKENS
        host.sleep(["kv_cache"], "none")
        host.wake(["kv_cache"])
        anew = host.tell(KNOWN, max_tokens=20)
        assert (anew.cached, anew.tokens) == (0, first.tokens)
        assert host.engine.error() == ""
