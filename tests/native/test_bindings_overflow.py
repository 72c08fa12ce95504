"""A sleep that finds too little room, from Python: what its plan would drop, and what it has dropped (K9)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torpor.native import Device, KvManager, Ledger, Misuse, OutOfHostMemory, Plan, Sequence

KIB = 1 << 10
BLOCK = 4
PAGE_BYTES = 8 * KIB
STAGE_TIMEOUT_S = 30.0
HELD, OLD, NEW = list(range(10)), list(range(100, 109)), list(range(200, 213))
NOTHING = {"pages": 0, "prefix_tokens": 0}


class Crowd:
    """A suspended sequence of 3 pages, then two prefixes of 2 and 3 whole blocks; the host tier holds 5 pages."""

    def __init__(self, device: Device, host_slots: int = 5) -> None:
        self.ledger = Ledger(device)
        self.cache: KvManager = self.ledger.create_kv_manager(
            layers=2,
            kv_heads=2,
            head_dim=64,
            dtype="float32",
            tokens_per_block=BLOCK,
            gpu_bytes=8 * PAGE_BYTES,
            host_bytes=host_slots * PAGE_BYTES,
        )
        self.held = self._computed("held", HELD)
        self.held.suspend()
        for scope, tokens in (("old", OLD[:8]), ("new", NEW[:12])):
            self._computed(scope, tokens).close()

    def _computed(self, scope: str, tokens: list[int]) -> Sequence:
        sequence = self.cache.create_sequence(scope, tokens)
        assert sequence.resume()
        assert sequence.resize(len(tokens))
        sequence.commit(tokens)
        return sequence

    def plan(self, overflow: str = "evict") -> Plan:
        return self.ledger.preflight("sleep", "op", restore={"kv_cache": "pinned"}, overflow=overflow)

    def found(self) -> dict[str, int]:
        return {scope: self.cache.probe(scope, tokens) for scope, tokens in (("old", OLD), ("new", NEW))}


@pytest.fixture
def crowd(make_device: Callable[..., Device]) -> Crowd:
    return Crowd(make_device(1 << 20, 64 * KIB))


def test_a_plan_says_what_it_evicts_and_the_reports_what_was_evicted_k9(crowd: Crowd) -> None:
    plan = crowd.plan()
    assert plan.refusals == []
    assert plan.evicts == plan.items[0]["evicts"] == {"pages": 3, "prefix_tokens": 12}
    assert crowd.found() == {"old": 8, "new": 12}
    assert crowd.ledger.stage(plan, STAGE_TIMEOUT_S)["evicted"] == NOTHING
    assert crowd.ledger.status()["evicted"] == NOTHING
    assert crowd.ledger.commit()["evicted"] == plan.evicts
    crowd.ledger.publish()
    assert crowd.ledger.status()["evicted"] == plan.evicts
    assert crowd.found() == {"old": 0, "new": 8}


def test_an_evicting_sleep_that_is_aborted_has_evicted_nothing_k9_f26(crowd: Crowd) -> None:
    plan = crowd.plan()
    crowd.ledger.stage(plan, STAGE_TIMEOUT_S)
    crowd.ledger.abort()
    assert crowd.ledger.status()["evicted"] == NOTHING
    assert crowd.found() == {"old": 8, "new": 12}
    assert crowd.held.resume()


def test_without_leave_to_evict_a_sleep_that_does_not_fit_is_refused_with_its_bytes_k9(crowd: Crowd) -> None:
    plan = crowd.plan("reject")
    assert plan.evicts == NOTHING
    assert [(row["code"], row["needed_bytes"], row["free_bytes"]) for row in plan.refusals] == [
        ("host_memory", 8 * PAGE_BYTES, 5 * PAGE_BYTES)
    ]
    with pytest.raises(OutOfHostMemory) as refused:
        crowd.ledger.stage(plan, STAGE_TIMEOUT_S)
    assert (refused.value.needed_bytes, refused.value.free_bytes) == (8 * PAGE_BYTES, 5 * PAGE_BYTES)
    with pytest.raises(Misuse, match="choose reject or evict"):
        crowd.plan("drop")


def test_held_pages_that_do_not_fit_alone_are_refused_also_with_evict_k9(
    make_device: Callable[..., Device],
) -> None:
    crowd = Crowd(make_device(1 << 20, 64 * KIB), host_slots=2)
    (refusal,) = crowd.plan().refusals
    assert refusal["code"] == "host_memory"
    assert (refusal["needed_bytes"], refusal["free_bytes"]) == (3 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert crowd.found() == {"old": 8, "new": 12}
