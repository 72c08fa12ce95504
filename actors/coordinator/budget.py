"""Bytes promised to running operations, per device and per node. A promise ends with its operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torpor.actors.messages import RankStatus, Refusal, RejectCode


@dataclass(frozen=True, slots=True)
class Place:
    """A device of a node, or, with device "", the node's host memory or its disk."""

    node: str
    device: str = ""
    disk: bool = False

    @staticmethod
    def of(status: RankStatus) -> Place:
        """The device of a rank."""
        return Place(status.node, status.device_id)


@dataclass(frozen=True, slots=True)
class Need:
    """One rank's: size_bytes more at `place`, which had free_bytes when asked; spare_bytes are to be left there."""

    place: Place
    size_bytes: int
    free_bytes: int
    spare_bytes: int = 0


@dataclass(slots=True)
class _Account:
    base_bytes: int  # free before the first promise was taken up
    promises: dict[str, int] = field(default_factory=dict)  # by operation

    @property
    def promised_bytes(self) -> int:
        return sum(self.promises.values())


class Budget:
    """A promise may be taken up at any moment of its operation, so that the free bytes seen in between lie
    anywhere from `base` to `base - promised`. Free for others is what neither device nor promises claim.
    """

    def __init__(self) -> None:
        self._accounts: dict[Place, _Account] = {}

    def reserved_bytes(self) -> int:
        return sum(account.promised_bytes for account in self._accounts.values())

    def has_promise(self, operation: str) -> bool:
        return any(operation in account.promises for account in self._accounts.values())

    def free_bytes(self, place: Place, seen_bytes: int) -> int:
        account = self._accounts.get(place)
        if account is None:
            return seen_bytes
        return min(seen_bytes, max(seen_bytes, account.base_bytes) - account.promised_bytes)

    def reserve(self, operation: str, needs: Iterable[Need]) -> Refusal | None:
        """All needs, or none and the reason."""
        by_place = _by_place(needs)
        for place, wanted in by_place.items():
            size, free = self._size_and_free(place, wanted)
            if size > free:
                return _refusal(place, size, max(0, free), max(need.spare_bytes for need in wanted))
        for place, wanted in by_place.items():
            seen = min(need.free_bytes for need in wanted)
            account = self._accounts.setdefault(place, _Account(seen))
            account.promises[operation] = sum(need.size_bytes for need in wanted)
        return None

    def lacking_bytes(self, needs: Iterable[Need]) -> dict[Place, int]:
        """Where there is too little, and by how much."""
        found = {place: self._size_and_free(place, wanted) for place, wanted in _by_place(needs).items()}
        return {place: size - free for place, (size, free) in found.items() if size > free}

    def _size_and_free(self, place: Place, wanted: list[Need]) -> tuple[int, int]:
        """What is needed at a place, and what is there for it."""
        size = sum(need.size_bytes for need in wanted)
        free = self.free_bytes(place, min(need.free_bytes for need in wanted))
        return size, free - max(need.spare_bytes for need in wanted)

    def release(self, operation: str, used: bool) -> None:
        """The operation has ended; `used` when its bytes are really taken now."""
        for place, account in list(self._accounts.items()):
            size = account.promises.pop(operation, None)
            if size is not None and used:
                account.base_bytes -= size
            if not account.promises:
                del self._accounts[place]

    def gave_back(self, place: Place, size_bytes: int) -> None:
        """A sleep has freed bytes while others hold promises here."""
        account = self._accounts.get(place)
        if account is not None:
            account.base_bytes += size_bytes


def _by_place(needs: Iterable[Need]) -> dict[Place, list[Need]]:
    by_place: dict[Place, list[Need]] = {}
    for need in needs:
        if need.size_bytes > 0:
            by_place.setdefault(need.place, []).append(need)
    return by_place


def _refusal(place: Place, needed_bytes: int, free_bytes: int, spare_bytes: int) -> Refusal:
    sizes = f"needed {gib(needed_bytes)}, free {gib(free_bytes)}"
    if spare_bytes:
        sizes += f" besides the {gib(spare_bytes)} of holds"
    if place.device:
        reason = f"{sizes} on {place.device} of node {place.node}; sleep another model there first"
        return Refusal(RejectCode.DEVICE_MEMORY, reason, needed_bytes=needed_bytes, free_bytes=free_bytes)
    if place.disk:
        reason = (
            f"{sizes} on the disk of node {place.node}; restore with another mode, or raise node.disk_bytes"
        )
        return Refusal(RejectCode.DISK_SPACE, reason, needed_bytes=needed_bytes, free_bytes=free_bytes)
    reason = f"{sizes} for kept contents on node {place.node}; restore with none, or raise node.host_bytes"
    return Refusal(RejectCode.HOST_MEMORY, reason, needed_bytes=needed_bytes, free_bytes=free_bytes)


def gib(size_bytes: int) -> str:
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.1f} GiB"
    return f"{size_bytes / (1 << 20):.1f} MiB"
