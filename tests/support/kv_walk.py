"""A long random walk over a cache of three kinds of layers, beside a model that knows what every page must hold.

Sequences, windows, states, snapshots, tiers, prefixes, events, sleep and wake in any order. In a roomy cache nothing is
ever dropped and the model says exactly what a prompt must find; in a tight one whatever is found must hold the right
contents, and the events must tell what is known.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import torch

from torpor.native import Buffer, Device, KvManager, LayerSpec, Ledger, Sequence

BLOCK, WINDOW, SINKS = 4, 6, 3
GRANULE_BYTES = 64 << 10
STAGE_TIMEOUT_S = 30.0
FULL, SLIDING, STATE = 0, 1, 2
STREAMS = ([1] * 40, [1] * 6 + [2] * 34, [3, 1] * 20)

Prefix = tuple[str, tuple[int, ...]]


def stale(block: int, history: int) -> bool:
    return block >= -(-SINKS // BLOCK) and history > WINDOW and block < (history - WINDOW) // BLOCK


@dataclass
class Walker:
    real: Sequence
    scope: str
    tokens: list[int]
    epoch: int
    kept: set[int]  # blocks of the window with a page of their own that is not scratch
    has_pages: bool
    active: bool = False
    sound_from: int = 0  # rows before it were lost to a discard
    state_sound: bool = True


@dataclass
class Walk:
    seed: int
    roomy: bool
    open: list[Walker] = field(default_factory=list)
    mode: str | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.ledger = Ledger(
            Device.host(f"kv-walk-{os.getpid()}-{self.seed}-{self.roomy}", 2 << 20, GRANULE_BYTES)
        )
        slots = 16 if self.roomy else 2  # granules of 8 slots, of each kind of page
        self.kv: KvManager = self.ledger.create_kv_cache(
            [
                LayerSpec("full", [Buffer("k", [256], "float32"), Buffer("v", [256], "float32")]),
                LayerSpec("window", [Buffer("k", [512], "float32")], window=WINDOW, sinks=SINKS),
                LayerSpec("state", [Buffer("ssm", [1024], "float32")]),
            ],
            BLOCK,
            (slots + 1) * GRANULE_BYTES,
            0 if self.roomy else 2 * GRANULE_BYTES,
            sequence_tokens=32,
            max_sequence_tokens=64,
            event_count=256,
            seed=self.seed,
        )
        self.views = {
            FULL: [torch.from_dlpack(self.kv.page_view(0, role)) for role in "kv"],
            SLIDING: [torch.from_dlpack(self.kv.page_view(1, "k"))],
            STATE: [torch.from_dlpack(self.kv.page_view(2, "ssm"))],
        }
        self.values: dict[Prefix, float] = {}
        self.known: dict[Prefix, set[int]] = {}  # life cycles that have a page of the block at its end
        self.blocks: set[int] = set()  # hashes, as the events tell
        self.next_event = 0
        self.free_bytes = self.ledger.device.memory_info()[0]
        self.counts: dict[str, int] = {}

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
        steps += [self.snapshot, self.snapshot, self.close, self.sleep, self.wake, self.wake, self.forget]
        step = self.random.choice(steps)
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
        real = self.kv.create_sequence(scope, prompt)
        assert real.matched_tokens == real.history_tokens == found
        kept = {block for block in range(found // BLOCK) if not stale(block, found)}
        self.open.append(Walker(real, scope, prompt[:found], self.epoch, kept, found > 0))

    def resume(self) -> None:
        one = self.pick()
        if one is None:
            return
        done = one.real.resume()
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
        done = one.real.resize(before + count)
        if self.roomy:
            assert done
        if not done:
            return
        one.tokens = one.tokens + tokens
        for cycle in (FULL, SLIDING):
            table = one.real.table(cycle)
            for at in range(before, before + count):
                for view in self.views[cycle]:
                    view[table[at // BLOCK], at % BLOCK] = self.value(one.scope, one.tokens[: at + 1])
        self.views[STATE][0][one.real.table(STATE)[0]] = self.value(one.scope, one.tokens)
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
        done = one.real.snapshot()
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
        mode = self.random.choice(["none", "memset", "cpu", "pinned"])
        plan = self.ledger.preflight("sleep", "op", restore={"kv_cache": mode})
        self.ledger.stage(plan, STAGE_TIMEOUT_S)
        if self.random.random() < 0.3:
            self.ledger.abort()
            return
        self.ledger.commit()
        self.ledger.publish()
        keeps = mode in ("cpu", "pinned")
        if self.mode is None or (self.mode in ("cpu", "pinned") and not keeps):
            self.mode = mode
            if not keeps:
                self.forgotten()
                for one in self.open:
                    if one.has_pages:
                        one.sound_from, one.state_sound = len(one.tokens), False

    def wake(self) -> None:
        if self.mode is None:
            return
        self.ledger.stage(self.ledger.preflight("wake", "op"), STAGE_TIMEOUT_S)
        if self.random.random() < 0.2:
            self.ledger.abort()
            return
        self.ledger.commit()
        self.ledger.publish()
        self.mode = None

    # --- what must hold after every step ---

    def check(self) -> None:
        self.follow_events()
        stats = self.kv.stats()
        assert stats["prefix_tokens"] == len(self.blocks) * BLOCK
        if self.roomy:
            assert len(self.blocks) == len(self.known) and stats["evicted_pages"] == 0
        assert stats["sequences"] == len(self.open)
        parked = sum(-(-pool["slots"] * pool["page_bytes"] // GRANULE_BYTES) for pool in self.kv.pools())
        freed = parked * GRANULE_BYTES if self.mode is not None else 0
        assert self.ledger.device.memory_info()[0] == self.free_bytes + freed
        private: set[int] = set()
        for one in self.open:
            assert one.real.state == ("active" if one.active else "suspended")
            assert one.real.history_tokens == len(one.tokens)
            shown = one.active and self.mode is None
            if not shown:
                assert all((one.real.table(cycle) == -1).all() for cycle in (FULL, SLIDING, STATE))
                continue
            self.check_contents(one)
            slot = int(one.real.table(STATE)[0])
            assert slot not in private, "two sequences write one state"
            private.add(slot)

    def check_contents(self, one: Walker) -> None:
        history = len(one.tokens)
        wanted = [self.value(one.scope, one.tokens[: at + 1]) for at in range(history)]
        for cycle in (FULL, SLIDING):
            table = one.real.table(cycle).tolist()
            for block in range(-(-history // BLOCK)):
                if cycle == SLIDING and stale(block, history):
                    assert table[block] == -1
                    continue
                rows = range(max(block * BLOCK, one.sound_from), min((block + 1) * BLOCK, history))
                for view in self.views[cycle]:
                    got = view[table[block], :, ::97].min(1).values.tolist()
                    assert all(got[at % BLOCK] == wanted[at] for at in rows), (cycle, block)
        if one.state_sound:
            expected = wanted[-1] if history else 0.0
            assert bool((self.views[STATE][0][int(one.real.table(STATE)[0])] == expected).all())

    def follow_events(self) -> None:
        batch = self.kv.events(self.next_event)
        assert not batch["lost"]
        self.next_event = batch["next"]
        for event in batch["events"]:
            if event["kind"] == "stored":
                assert event["block"] not in self.blocks
                self.blocks.add(event["block"])
            elif event["kind"] == "removed":
                self.blocks.remove(event["block"])

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
