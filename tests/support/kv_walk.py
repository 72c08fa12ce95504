"""A long random walk over a cache of several kinds of layers, beside a model that knows what every page must hold.

Sequences, windows, states, snapshots, tiers, prefixes, priorities, events, sleep and wake in every mode, aborts, pools
that change, all in any order, on a device that fails now and then: what fails must leave everything as it was, and
work when it is tried again. In a roomy cache nothing is ever dropped and the model says exactly what a prompt must
find; in a tight one whatever is found must hold the right contents, and the events must tell what is known. A partial
one is tight, has no states, and matches prompts inside of blocks too.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from support.kv_walk_cache import (
    BLOCK,
    CAPACITY_BYTES,
    FULL,
    GRANULE_BYTES,
    SLIDING,
    STATE,
    Prefix,
    Walker,
    make_cache,
    stale,
)

from torpor.native import Device, DeviceError, FaultyDevice, Ledger, Misuse, OutOfMemory

STAGE_TIMEOUT_S = 30.0
STREAMS = ([1] * 40, [1] * 6 + [2] * 34, [3, 1] * 20)
FAULT_SHARE = 0.1  # of the calls that touch the device
MODES = ("none", "memset", *("cpu", "pinned", "disk") * 3)
KEEPS = ("cpu", "pinned", "disk")

T = TypeVar("T")


@dataclass
class Walk:
    seed: int
    kind: str  # roomy, tight or partial
    open: list[Walker] = field(default_factory=list)
    mode: str | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.roomy, self.has_state = self.kind == "roomy", self.kind != "partial"
        name = f"kv-walk-{os.getpid()}-{self.seed}-{self.kind}"
        self.device = FaultyDevice(Device.host(name, CAPACITY_BYTES, GRANULE_BYTES))
        self.ledger = Ledger(
            self.device, disk_path=tempfile.gettempdir(), disk_bytes=(16 if self.roomy else 1) << 20
        )
        self.kv = make_cache(self.ledger, self.kind, self.seed)
        self.cycles = (FULL, SLIDING, STATE) if self.has_state else (FULL, SLIDING)
        self.first_sizes = self.sizes()
        self.look()
        self.values: dict[Prefix, float] = {}
        self.known: dict[Prefix, set[int]] = {}  # life cycles that have a page of the block at its end
        self.blocks: dict[int, int] = {}  # tokens by hash, as the events tell
        self.next_event = 0
        self.counts = dict.fromkeys(("faults", "refused", "aborted"), 0)

    def look(self) -> None:
        """The views of the slots that there are now."""
        self.views = {
            FULL: [torch.from_dlpack(self.kv.page_view(0, role)) for role in "kv"],
            SLIDING: [torch.from_dlpack(self.kv.page_view(1, "k"))],
        }
        if self.has_state:
            self.views[STATE] = [torch.from_dlpack(self.kv.page_view(2, "ssm"))]
        # Of each row a few numbers: rows are written as a whole.
        self.samples = {cycle: [view[..., ::97] for view in views] for cycle, views in self.views.items()}

    def sizes(self) -> list[int]:
        return [pool["size_bytes"] for pool in self.kv.pools()]

    def attempt(self, call: Callable[[], T], settles: bool = True) -> T:
        """Makes the call on a device that may fail in it; then nothing must have changed, and it is made again.

        settles: false for a commit, which only goes forward.
        """
        if self.random.random() >= FAULT_SHARE:
            return call()
        self.device.fail_at(self.random.choice((1, 1, 2, 2, 3, 4, 5, 7, 9)))
        try:
            return call()
        except DeviceError:
            self.counts["faults"] += 1
        finally:
            self.device.fail_at(0)
        if settles:
            self.check()
        return call()

    def value(self, scope: str, tokens: list[int]) -> float:
        return self.values.setdefault((scope, tuple(tokens)), float(len(self.values) + 1))

    def expected_match(self, scope: str, prompt: list[int]) -> int:
        for count in range((len(prompt) - 1) // BLOCK, 0, -1):
            have = [self.known.get((scope, tuple(prompt[: (b + 1) * BLOCK])), set()) for b in range(count)]
            windows = all(SLIDING in have[b] for b in range(count) if not stale(b, count * BLOCK))
            if all(FULL in one for one in have) and windows and STATE in have[-1]:
                return count * BLOCK
        return 0

    # --- steps ---

    def step(self) -> None:
        steps = [self.create, self.create, self.resume, self.suspend, self.extend, self.extend, self.extend]
        steps += [self.snapshot, self.snapshot, self.close, self.sleep, self.wake, self.forget, self.maintain]
        step = self.random.choice(steps)
        if step in (self.forget, self.maintain) and self.random.random() < 0.7:
            step = self.resume
        if self.mode is not None and self.random.random() < 0.4:
            step = self.wake  # little happens asleep
        if step == self.forget and self.random.random() < 0.8:
            step = self.extend
        self.counts[step.__name__] = self.counts.get(step.__name__, 0) + 1
        step()
        self.check()

    def pick(self, active: bool | None = None) -> Walker | None:
        fitting = [one for one in self.open if active is None or one.active == active]
        return self.random.choice(fitting) if fitting else None

    def create(self) -> None:
        if len(self.open) >= 6:
            return
        scope = self.random.choice(["one", "two"])
        prompt = self.random.choice(STREAMS)[: self.random.randint(0, 34)]
        found = self.kv.probe(scope, prompt)
        if self.roomy:
            assert found == self.expected_match(scope, prompt)
        real = self.kv.create_sequence(scope, prompt, priority=self.random.randint(0, 3))
        assert real.matched_tokens == real.history_tokens == found
        kept = {block for block in range(-(-found // BLOCK)) if not stale(block, found)}
        values = [self.value(scope, prompt[: at + 1]) for at in range(found)]
        self.open.append(Walker(real, scope, prompt[:found], self.epoch, kept, found > 0, values))

    def resume(self) -> None:
        one = self.pick(active=False if self.random.random() < 0.9 else None)
        if one is None:
            return
        done = self.attempt(one.real.resume)
        assert done == one.active if self.mode is not None else True
        if self.roomy and self.mode is None:
            assert done
        one.active = one.active or done
        one.has_pages = one.has_pages or done

    def suspend(self) -> None:
        if one := self.pick(active=True):
            one.real.suspend()
            one.active = False

    def extend(self) -> None:
        one = self.pick(active=True)
        if one is None or self.mode is not None:
            return
        before = len(one.tokens)
        stream = self.random.choice(STREAMS)
        count = self.random.choice([1, 2, 4, BLOCK - before % BLOCK, 13])
        if before + count > 40:
            return
        follows = [s for s in STREAMS if s[:before] == one.tokens]
        tokens = (follows[0] if follows else stream)[before : before + count]
        done = self.attempt(lambda: one.real.resize(before + count))
        if self.roomy:
            assert done
        if not done:
            return
        one.tokens = one.tokens + tokens
        one.values += [self.value(one.scope, one.tokens[: at + 1]) for at in range(before, len(one.tokens))]
        for cycle in (FULL, SLIDING):
            table = one.real.table(cycle)
            for at in range(before, before + count):
                for view in self.views[cycle]:
                    view[table[at // BLOCK], at % BLOCK] = one.values[at]
        if self.has_state:
            self.views[STATE][0][one.real.table(STATE)[0]] = one.values[-1]
        one.state_sound = True
        one.real.commit(tokens)
        self.computed(one)

    def computed(self, one: Walker) -> None:
        history = len(one.tokens)
        one.kept |= {block for block in range(-(-history // BLOCK)) if not stale(block, history)}
        if one.epoch == self.epoch:
            for block in range(history // BLOCK):
                have = self.known.setdefault((one.scope, tuple(one.tokens[: (block + 1) * BLOCK])), set())
                have |= {FULL, SLIDING} if block in one.kept else {FULL}
        one.kept = {block for block in one.kept if not stale(block, history)}

    def snapshot(self) -> None:
        one = self.pick(active=True)
        if one is None or self.mode is not None or not one.tokens or len(one.tokens) % BLOCK:
            return
        if not self.has_state:
            return
        done = self.attempt(one.real.snapshot)
        if one.epoch != self.epoch:
            assert not done
        elif self.roomy:
            assert done
        if done:
            self.known.setdefault((one.scope, tuple(one.tokens)), {FULL}).add(STATE)

    def close(self) -> None:
        if one := self.pick():
            one.real.close()
            self.open.remove(one)

    def forget(self) -> None:
        self.kv.forget_prefixes()
        self.forgotten()

    def forgotten(self) -> None:
        self.epoch += 1
        self.known.clear()
        for one in self.open:
            if not one.has_pages:
                one.epoch = self.epoch

    def sleep(self) -> None:
        mode = self.random.choice(MODES)
        overflow = self.random.choice(("reject", "evict"))
        plan = self.ledger.preflight("sleep", "op", restore={"kv_cache": mode}, overflow=overflow)
        if plan.refusals:
            # A tight cache holds more than its host tier, or the one piece of its disk, has room for (K9).
            (refusal,) = plan.refusals
            assert not self.roomy and refusal["code"] == ("disk" if mode == "disk" else "host_memory")
            assert refusal["needed_bytes"] > refusal["free_bytes"]
            self.counts["refused"] += 1
            return
        if plan.refusals:  # more is live than the host tier has room for
            assert mode in KEEPS and plan.refusals[0]["code"] == "host_memory"
            return
        self.attempt(lambda: self.ledger.stage(plan, STAGE_TIMEOUT_S))
        if self.random.random() < 0.3:
            self.counts["aborted"] += 1
            self.ledger.abort()
            return
        self.attempt(self.ledger.commit, settles=False)
        self.ledger.publish()
        keeps = mode in KEEPS
        if self.mode is None or (self.mode in KEEPS and not keeps):
            self.mode = mode
            if not keeps:
                self.forgotten()
                for one in self.open:
                    if one.has_pages:
                        one.sound_from, one.state_sound = len(one.tokens), False

    def wake(self) -> None:
        if self.mode is None:
            return
        plan = self.ledger.preflight("wake", "op")
        self.attempt(lambda: self.ledger.stage(plan, STAGE_TIMEOUT_S))
        if self.random.random() < 0.2:
            self.counts["aborted"] += 1
            self.ledger.abort()
            return
        self.ledger.commit()
        self.ledger.publish()
        self.mode = None

    def maintain(self) -> None:
        """Pools change while everything is awake and suspended; else that is refused."""
        forbidden = self.mode is not None or (
            self.random.random() < 0.2 and any(one.active for one in self.open)
        )
        for one in self.open:
            if one.active and not forbidden:
                one.real.suspend()
                one.active = False
        change = self.change()
        before = self.sizes()
        try:
            self.attempt(change)
        except (Misuse, OutOfMemory) as error:
            assert not self.roomy or forbidden
            assert isinstance(error, Misuse) or error.needed_bytes > error.free_bytes
            assert self.sizes() == before
            self.counts["refused"] += 1
            return
        assert not forbidden
        self.look()

    def change(self) -> Callable[[], object]:
        # A roomy cache never has less than at the start, so that nothing is dropped.
        least = [size // GRANULE_BYTES if self.roomy else 1 for size in self.first_sizes]
        sizes = [(one + self.random.randint(0, 3)) * GRANULE_BYTES for one in least]
        if self.roomy:
            return lambda: self.kv.resize_pools(sizes)
        host_bytes = self.random.choice((None, GRANULE_BYTES, 2 * GRANULE_BYTES))
        shares = [self.random.uniform(1, 9) for _ in sizes]
        changes: list[Callable[[], object]] = [
            lambda: self.kv.resize_pools(sizes, host_bytes=host_bytes),
            lambda: self.kv.rebalance(shares),
            self.kv.rebalance,
        ]
        return self.random.choice(changes)

    # --- what must hold after every step ---

    def check(self) -> None:
        self.follow_events()
        stats = self.kv.stats()
        assert stats["prefix_tokens"] == sum(self.blocks.values())
        if self.roomy:
            assert len(self.blocks) == len(self.known) and stats["evicted_pages"] == 0
        assert stats["sequences"] == len(self.open)
        mapped_bytes = 0 if self.mode is not None else sum(self.sizes())
        assert self.device.memory_info()[0] == CAPACITY_BYTES - mapped_bytes
        private: set[int] = set()
        for one in self.open:
            assert one.real.state == ("active" if one.active else "suspended")
            assert one.real.history_tokens == len(one.tokens)
            shown = one.active and self.mode is None
            if not shown:
                assert all((one.real.table(cycle) == -1).all() for cycle in self.cycles)
                continue
            self.check_contents(one)
            if not self.has_state:
                continue
            slot = int(one.real.table(STATE)[0])
            assert slot not in private, "two sequences write one state"
            private.add(slot)

    def check_contents(self, one: Walker) -> None:
        history = len(one.tokens)
        blocks = range(-(-history // BLOCK))
        for cycle in (FULL, SLIDING):
            table = one.real.table(cycle)[: len(blocks)].tolist()
            live = [block for block in blocks if cycle == FULL or not stale(block, history)]
            assert all((table[block] == -1) == (block not in live) for block in blocks)
            slots = torch.tensor([table[block] for block in live], dtype=torch.long)
            for sample in self.samples[cycle]:
                got = sample[slots]
                for block, low, high in zip(live, got.amin(2).tolist(), got.amax(2).tolist(), strict=True):
                    rows = range(max(block * BLOCK, one.sound_from), min((block + 1) * BLOCK, history))
                    assert all(low[at % BLOCK] == high[at % BLOCK] == one.values[at] for at in rows), (
                        cycle,
                        block,
                    )
        if one.state_sound and self.has_state:
            expected = one.values[-1] if history else 0.0
            assert bool((self.views[STATE][0][int(one.real.table(STATE)[0])] == expected).all())

    def follow_events(self) -> None:
        batch = self.kv.events(self.next_event)
        assert not batch["lost"]
        self.next_event = batch["next"]
        for event in batch["events"]:
            if event["kind"] == "stored":
                assert event["block"] not in self.blocks
                self.blocks[event["block"]] = event["tokens"]
            elif event["kind"] == "removed":
                del self.blocks[event["block"]]

    def end(self) -> None:
        """Everything closed and forgotten: nothing may be left."""
        while self.mode is not None:
            self.wake()
        for one in self.open:
            one.real.close()
        self.kv.forget_prefixes()
        stats = self.kv.stats()
        assert (
            stats["free_slots"] == stats["slots"] and stats["host_bytes"] == 0 and stats["prefix_tokens"] == 0
        )


def walk(seed: int, kind: str, steps: int) -> Walk:
    """So many steps and the end; an AssertionError says where it went wrong."""
    one = Walk(seed, kind)
    for number in range(steps):
        try:
            one.step()
        except Exception as error:
            raise AssertionError(f"walk {kind}, seed {seed}, step {number}: {error!r}") from error
    one.end()
    return one
