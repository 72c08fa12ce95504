"""What the KV manager must do with pages of one size, as plain Python (test_kv_model.py holds both side by side)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torpor.native import Sequence

BLOCK = 4

Key = tuple[str, tuple[int, ...]]


@dataclass(eq=False)
class ModelPage:
    on_gpu: bool = True
    has_bytes: bool = True
    users: int = 0
    active: int = 0
    key: Key | None = None
    content: float | None = None  # None: undefined

    @property
    def status(self) -> str:
        return "locked" if self.active else "held" if self.users else "droppable"


@dataclass(eq=False)
class ModelSequence:
    real: Sequence
    scope: str
    tokens: list[int]
    pages: list[ModelPage]
    epoch: int
    published: int
    active: bool = False


@dataclass
class Model:
    slots: int
    host_slots: int
    order: list[ModelPage] = field(default_factory=list)  # least recently used first
    tree: dict[Key, ModelPage] = field(default_factory=dict)
    epoch: int = 0
    evicted: int = 0

    def having(self, status: str, on_gpu: bool) -> list[ModelPage]:
        return [page for page in self.order if page.status == status and page.on_gpu == on_gpu]

    @property
    def free_slots(self) -> int:
        return self.slots - sum(page.on_gpu for page in self.order)

    @property
    def host_room(self) -> int:
        return self.host_slots - sum(page.has_bytes and not page.on_gpu for page in self.order)

    def touch(self, page: ModelPage) -> None:
        self.order.remove(page)
        self.order.append(page)

    def use(self, pages: Iterable[ModelPage], users: int = 0, active: int = 0) -> None:
        for page in pages:
            page.users += users
            page.active += active
            self.touch(page)
            if page.users == 0 and page.key is None:
                self.order.remove(page)

    def drop(self, page: ModelPage) -> None:
        assert page.key is not None
        scope, tokens = page.key
        for key in [k for k in self.tree if k[0] == scope and k[1][: len(tokens)] == tokens]:
            gone = self.tree.pop(key)
            gone.key = None
            if gone.users == 0:
                self.order.remove(gone)
                self.evicted += 1

    def match(self, scope: str, prompt: list[int]) -> list[ModelPage]:
        found = []
        for end in range(BLOCK, len(prompt), BLOCK):
            page = self.tree.get((scope, tuple(prompt[:end])))
            if page is None:
                break
            found.append(page)
        return found[: self.slots]

    def forget(self, sequences: list[ModelSequence]) -> int:
        known = len(self.tree)
        self.epoch += 1
        for page in self.tree.values():
            page.key = None
            if page.users == 0:
                self.order.remove(page)
        self.tree.clear()
        for one in sequences:
            if not one.pages:
                one.epoch = self.epoch
        return known * BLOCK

    def make_room(self, wanted: int, own: list[ModelPage]) -> bool:
        leaving = sum(page.has_bytes and not page.on_gpu for page in own)  # their places are room already
        while wanted > self.free_slots:
            missing = wanted - self.free_slots
            reusable = self.having("droppable", True)[:missing]
            held = [page for page in self.having("held", True) if page not in own]
            moving = held[: missing - len(reusable)]
            old = self.having("droppable", False)
            room = self.host_room + leaving + len(old)
            if wanted > self.slots or len(reusable) + len(moving) < missing or len(moving) > room:
                return False
            kept = min(len(reusable), room - len(moving))
            dropped, moving = reusable[: len(reusable) - kept], reusable[len(reusable) - kept :] + moving
            if len(moving) > self.host_room + leaving:
                for _ in range(len(moving) - self.host_room - leaving):
                    if rest := self.having("droppable", False):
                        self.drop(rest[0])
                continue
            for page in moving:
                page.on_gpu, page.has_bytes = False, True
                self.touch(page)
            for page in dropped:
                if page in self.order:
                    self.drop(page)
        return True
