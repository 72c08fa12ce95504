"""Priorities, events of all tiers, and verified sleeps over the disk tier, from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torpor.native import Device, KvManager, Ledger, Misuse

KIB = 1 << 10
BLOCK = 4
PAGE_BYTES = 8 * KIB
STAGE_TIMEOUT_S = 30.0
PROMPT = list(range(9))  # two whole blocks and one token


def make_cache(ledger: Ledger, **tiers: object) -> KvManager:
    return ledger.create_kv_manager(
        layers=2,
        kv_heads=2,
        head_dim=64,
        dtype="float32",
        tokens_per_block=BLOCK,
        gpu_bytes=8 * PAGE_BYTES,
        **tiers,
    )


@pytest.fixture
def ledger(make_device: Callable[..., Device], tmp_path: Path) -> Ledger:
    device = make_device(1 << 20, 64 * KIB)
    return Ledger(device, disk_path=str(tmp_path), disk_bytes=4 << 20)


def keep(cache: KvManager, scope: str, **how: int) -> None:
    sequence = cache.create_sequence(scope, PROMPT, **how)
    assert sequence.resume()
    assert sequence.resize(len(PROMPT))
    sequence.commit(PROMPT[sequence.history_tokens :])
    sequence.close()


def run(ledger: Ledger, kind: str, **asked: object) -> None:
    plan = ledger.preflight(kind, "op", verify=True, **asked)
    assert plan.refusals == []
    ledger.stage(plan, STAGE_TIMEOUT_S)
    ledger.commit()
    ledger.publish()


def test_a_sequence_s_priority_steers_what_is_evicted(ledger: Ledger) -> None:
    cache = make_cache(ledger)
    keep(cache, "kept", priority=3)
    for scope in "abcd":
        keep(cache, scope)
    keep(cache, "passing", priority=0)
    keep(cache, "e")
    assert cache.probe("kept", PROMPT) == 8
    assert cache.probe("passing", PROMPT) == 0
    assert cache.probe("a", PROMPT) == 0
    with pytest.raises(Misuse, match="one of 0 to 3"):
        cache.create_sequence("x", PROMPT, priority=4)


def test_events_name_every_tier_and_count_what_was_lost(ledger: Ledger) -> None:
    cache = make_cache(ledger, cold_gpu_bytes=64 * KIB, host_bytes=4 * PAGE_BYTES, disk_bytes=4 * PAGE_BYTES)
    for number in range(20):
        keep(cache, str(number))
    answer = cache.events()
    tiers = {kind: set() for kind in ("stored", "moved", "removed")}
    for event in answer["events"]:
        tiers[event["kind"]].add(event["tier"])
    assert answer["lost"] == 0
    assert tiers["stored"] == {"gpu"}
    assert tiers["moved"] >= {"cold_gpu", "host", "disk"}
    assert "disk" in tiers["removed"]
    assert cache.events(answer["next"] + 7)["lost"] == 1


def test_a_verified_sleep_covers_all_tiers_and_wakes_each_page_in_its_own_k6_k13(ledger: Ledger) -> None:
    # The tiers' ceilings bind a sleep: with the host tier full, the disk has room for all that is on the GPU.
    cache = make_cache(ledger, cold_gpu_bytes=64 * KIB, host_bytes=4 * PAGE_BYTES, disk_bytes=32 * PAGE_BYTES)
    for number in range(14):
        keep(cache, str(number))
    names = ("cold_gpu_pages", "host_pages", "disk_pages")
    before = [cache.stats()[name] for name in names]
    assert min(before) > 0
    for mode in ("pinned", "disk"):
        run(ledger, "sleep", restore={"kv_cache": mode})
        run(ledger, "wake")
        assert [cache.stats()[name] for name in names] == before
