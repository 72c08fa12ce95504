"""The KV manager against a small reference model: sequences, prefixes, tiers, sleep, wake and a pool that changes, in
any order.

The model keeps pages as Python objects in one list ordered by use, and prefixes as a dict from token tuples. After
every step its counts must be those of the manager, and the pages of active sequences must hold what was written.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.kv_model import BLOCK, Model, ModelPage, ModelSequence

from torpor.native import Device, Ledger, Misuse, OutOfDeviceMemory, TorporError

SLOTS = 8
HOST_SLOTS = 5
GRANULE_BYTES = 64 << 10
PAGE_BYTES = 8 << 10
STAGE_TIMEOUT_S = 30.0
# Prompts are beginnings of these, so that prefixes meet often.
STREAMS = ([1] * 40, [1] * 6 + [2] * 34, [3, 1] * 20)

_numbers = itertools.count()


class KvMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        name = f"kv-model-{os.getpid()}-{next(_numbers)}"
        self.device = Device.host(name, 1 << 20, GRANULE_BYTES)
        self.ledger = Ledger(self.device)
        self.kv = self.ledger.create_kv_manager(
            2,
            2,
            64,
            "float32",
            BLOCK,
            SLOTS * PAGE_BYTES,
            HOST_SLOTS * PAGE_BYTES,
            seed=next(_numbers),
            max_gpu_bytes=2 * SLOTS * PAGE_BYTES,
        )
        self.look()
        self.model = Model(SLOTS, HOST_SLOTS)
        self.open: list[ModelSequence] = []
        self.mode: str | None = None  # in force while parked
        self.contents = itertools.count(1)
        self.free_bytes = self.device.memory_info()[0]

    def look(self) -> None:
        self.views = [torch.from_dlpack(self.kv.page_view(i, role)) for i in (0, 1) for role in "kv"]

    def pick(self, number: int) -> ModelSequence:
        return self.open[number % len(self.open)]

    numbers = st.integers(0, 1000)
    scopes = st.sampled_from(["one", "two"])
    prompts = st.builds(lambda stream, n: stream[:n], st.sampled_from(STREAMS), st.integers(0, 30))
    long_prompts = st.builds(lambda stream, n: stream[:n], st.sampled_from(STREAMS), st.integers(14, 30))
    modes = st.sampled_from(["none", "memset", "cpu", "pinned"])

    @rule(scope=scopes, prompt=prompts)
    def probe(self, scope: str, prompt: list[int]) -> None:
        assert self.kv.probe(scope, prompt) == len(self.model.match(scope, prompt)) * BLOCK

    @precondition(lambda self: len(self.open) < 6)
    @rule(scope=scopes, prompt=prompts)
    def create(self, scope: str, prompt: list[int]) -> None:
        found = self.model.match(scope, prompt)
        real = self.kv.create_sequence(scope, prompt)
        assert real.matched_tokens == real.history_tokens == len(found) * BLOCK
        self.model.use(reversed(found), users=1)
        tokens = prompt[: real.matched_tokens]
        self.open.append(ModelSequence(real, scope, tokens, found, self.model.epoch, len(found)))

    @precondition(lambda self: len(self.open) < 6 and self.mode is None)
    @rule(scope=scopes, prompt=long_prompts, then=st.sampled_from(["run", "suspend", "suspend", "close"]))
    def serve(self, scope: str, prompt: list[int], then: str) -> None:
        self.create(scope, prompt)
        last = len(self.open) - 1
        self.resume(last)
        self.extend(last, prompt[len(self.open[last].tokens) :])
        if then == "suspend":
            self.suspend(last)
        elif then == "close":
            self.close(last)

    @precondition(lambda self: self.open)
    @rule(number=numbers)
    def resume(self, number: int) -> None:
        one = self.pick(number)
        away = [page for page in one.pages if not page.on_gpu]
        if one.active:
            expected = True
        elif expected := self.mode is None and self.model.make_room(len(away), one.pages):
            for page in away:
                page.on_gpu = page.has_bytes = True
                self.model.touch(page)
            self.model.use(one.pages, active=1)
            one.active = True
        assert one.real.resume() is expected

    @precondition(lambda self: self.open)
    @rule(number=numbers)
    def suspend(self, number: int) -> None:
        one = self.pick(number)
        one.real.suspend()
        if one.active:
            self.model.use(reversed(one.pages), active=-1)
        one.active = False

    @precondition(lambda self: self.open and self.mode is None)
    @rule(number=numbers)
    def swap(self, number: int) -> None:
        for index, one in enumerate(self.open):
            if one.active:
                self.suspend(index)
        self.resume(number)

    @precondition(lambda self: self.mode is None and any(one.active for one in self.open))
    @rule(number=numbers, tokens=st.lists(st.integers(1, 3), max_size=9))
    def extend(self, number: int, tokens: list[int]) -> None:
        one = self.pick(number)
        if not one.active:
            return
        before = len(one.tokens)
        wanted = -(-(before + len(tokens)) // BLOCK)
        grown = wanted - len(one.pages)
        room = grown <= 0 or (wanted <= self.model.slots and self.model.make_room(grown, []))
        assert one.real.resize(before + len(tokens)) is room
        if not room:
            return
        self.release(one, wanted)
        while len(one.pages) < wanted:
            one.pages.append(ModelPage(users=1, active=1))
            self.model.order.append(one.pages[-1])
        one.tokens = one.tokens + tokens
        for index in range(before // BLOCK, -(-len(one.tokens) // BLOCK) if tokens else 0):
            one.pages[index].content = float(next(self.contents))
            for view in self.views:
                view[one.real.page_table[index]] = one.pages[index].content
        one.real.commit(tokens)
        self.publish(one)

    def publish(self, one: ModelSequence) -> None:
        full = len(one.tokens) // BLOCK
        if one.epoch != self.model.epoch or full == one.published:
            return
        for index in range(full):
            key = (one.scope, tuple(one.tokens[: (index + 1) * BLOCK]))
            if key not in self.model.tree:
                self.model.tree[key] = one.pages[index]
                one.pages[index].key = key
        one.published = full

    def release(self, one: ModelSequence, first: int) -> None:
        while len(one.pages) > first:
            page = one.pages.pop()
            self.model.use([page], active=-1 if one.active else 0, users=-1)

    @precondition(lambda self: self.open)
    @rule(number=numbers)
    def close(self, number: int) -> None:
        one = self.pick(number)
        one.real.close()
        self.release(one, 0)
        self.open.remove(one)
        assert one.real.state == "closed" and (one.real.page_table == -1).all()

    @rule(really=st.integers(0, 4))
    def forget_prefixes(self, really: int) -> None:
        if really == 0:
            self.forget()

    def forget(self) -> None:
        assert self.kv.forget_prefixes() == self.model.forget(self.open)

    @precondition(lambda self: self.mode is None)
    @rule(pools=st.sampled_from([1, 2, 2]))
    def resize_pool(self, pools: int) -> None:
        slots, before = pools * SLOTS, self.model.slots
        for index in range(len(self.open)):
            self.suspend(index)
        refusal: type[TorporError] | None = None
        if any(slots < len(one.pages) <= before for one in self.open):
            refusal = Misuse  # it could never resume
        elif slots < before and not self.model.make_room(before - slots, []):
            refusal = OutOfDeviceMemory
        if refusal is not None:
            with pytest.raises(refusal):
                self.kv.resize_pools(slots * PAGE_BYTES)
            return
        self.kv.resize_pools(slots * PAGE_BYTES)
        self.model.slots = slots
        self.look()

    @rule(mode=modes, end=st.sampled_from(["abort", "stay", "wake", "wake"]))
    def sleep(self, mode: str, end: str) -> None:
        keeps = mode in ("cpu", "pinned")
        plan = self.ledger.preflight("sleep", "op", restore={"kv_cache": mode})
        if plan.refusals:  # more is live than the host tier has room for
            assert keeps and plan.refusals[0]["code"] == "host_memory"
            return
        live = sum(page.on_gpu for page in self.model.order)
        assert plan.keep_bytes == (live * PAGE_BYTES if keeps and self.mode is None else 0)
        self.ledger.stage(plan, STAGE_TIMEOUT_S)
        if end == "abort":
            self.ledger.abort()
            return
        self.ledger.commit()
        self.ledger.publish()
        self.fell_asleep(mode, keeps)
        if end == "wake":
            self.wake(abort=False)

    def fell_asleep(self, mode: str, keeps: bool) -> None:
        if self.mode is None or (self.mode in ("cpu", "pinned") and not keeps):
            self.mode = mode
            if not keeps:
                self.model.forget(self.open)
                for page in self.model.order:
                    page.content = 0.0 if mode == "memset" else None
                    page.has_bytes = page.on_gpu

    @precondition(lambda self: self.mode is not None)
    @rule(abort=st.booleans())
    def wake(self, abort: bool) -> None:
        self.ledger.stage(self.ledger.preflight("wake", "op"), STAGE_TIMEOUT_S)
        if abort:
            self.ledger.abort()
            return
        self.ledger.commit()
        self.ledger.publish()
        self.mode = None
        for page in self.model.order:
            page.has_bytes = True  # made anew after a discard

    @invariant()
    def counts_agree(self) -> None:
        stats, model = self.kv.stats(), self.model
        for status in ("locked", "held", "droppable"):
            pages = len(model.having(status, True)) + len(model.having(status, False))
            assert stats[f"{status}_pages"] == pages, status
        assert stats["host_pages"] == sum(not page.on_gpu for page in model.order)
        assert stats["free_slots"] == (model.free_slots if self.mode is None else 0)
        assert stats["prefix_tokens"] == len(model.tree) * BLOCK
        assert stats["evicted_pages"] == model.evicted
        assert (stats["host_bytes"] == 0) == (self.host_copies() == 0)
        grown_bytes = 0 if self.mode is not None else (model.slots - SLOTS) * PAGE_BYTES
        parked_bytes = 0 if self.mode is None else SLOTS * PAGE_BYTES
        assert self.device.memory_info()[0] == self.free_bytes + parked_bytes - grown_bytes

    def host_copies(self) -> int:
        saved = self.mode in ("cpu", "pinned")
        return sum(page.has_bytes and (saved or not page.on_gpu) for page in self.model.order)

    @invariant()
    def sequences_agree(self) -> None:
        for one in self.open:
            assert one.real.state == ("active" if one.active else "suspended")
            assert one.real.history_tokens == len(one.tokens)
            assert one.real.capacity_tokens == len(one.pages) * BLOCK
            table = one.real.page_table
            shown = len(one.pages) if one.active and self.mode is None else 0
            assert (table[:shown] >= 0).all() and (table[shown:] == -1).all()

    @invariant()
    def contents_agree(self) -> None:
        slots: dict[int, ModelPage] = {}
        for one in self.open:
            if not one.active or self.mode is not None:
                continue
            for page, slot in zip(one.pages, one.real.page_table.tolist(), strict=False):
                assert slots.setdefault(slot, page) is page, "two pages in one slot"
                if page.content is not None:
                    assert all(bool((view[slot] == page.content).all()) for view in self.views)


TestKvModel = KvMachine.TestCase
TestKvModel.settings = settings(
    max_examples=150,
    stateful_step_count=80,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
