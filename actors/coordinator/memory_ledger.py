"""The counted memory of an in-process rank: a device that several share, and one transaction at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torpor.actors.messages import (
    Kind,
    LedgerPhase,
    OnDiscard,
    OperationRequest,
    Phase,
    PhaseCall,
    PhaseReply,
    Refusal,
    RejectCode,
    RestoreMode,
)


@dataclass
class MemoryDevice:
    id: str
    capacity_bytes: int
    used: dict[str, int] = field(default_factory=dict)  # by owner

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(self.used.values())

    def take(self, owner: str, size_bytes: int) -> bool:
        if size_bytes > self.free_bytes:
            return False
        self.used[owner] = self.used.get(owner, 0) + size_bytes
        return True

    def give(self, owner: str, size_bytes: int) -> None:
        left = self.used.get(owner, 0) - size_bytes
        assert left >= 0, f"{owner} gives back more than it has"
        self.used[owner] = left


@dataclass(frozen=True)
class _Plan:
    operation: str
    kind: Kind
    tags: tuple[str, ...]  # those that change
    modes: dict[str, RestoreMode]
    reload: bool = False  # of the weights, from their source

    @property
    def digest(self) -> str:
        again = "reload:" if self.reload else ""
        return f"{again}{self.kind}:{','.join(f'{tag}={self.modes[tag]}' for tag in self.tags)}"


_BLANK = PhaseReply("", Phase.PREFLIGHT, 0, 0, "", ok=True)


class MemoryLedger:
    """sizes: bytes by tag, all on the device at the start. parked: tag → mode that it sleeps with."""

    def __init__(
        self,
        owner: str,
        device: MemoryDevice,
        sizes: dict[str, int],
        modes: dict[str, RestoreMode],
        loaded: bool = True,
    ) -> None:
        self.owner = owner
        self.device = device
        self.sizes = sizes
        self.modes = modes
        self.parked: dict[str, RestoreMode] = {}
        self.kept: dict[str, int] = {}  # host bytes by tag
        self.undefined: set[str] = set()
        self.weights_version = 0
        self.written: int | None = 0  # the version whose bytes are really there, or kept; None: rubbish
        self.paused = False
        self.resets = 0
        self.looks_ahead = False  # as the native one, refuses in preflight what its device has no room for
        self.phase = LedgerPhase.IDLE
        self.operation: str | None = None  # staged, or committed last
        self.kind: Kind | None = None
        self._plan: _Plan | None = None
        self._committed: PhaseReply = _BLANK
        if loaded:
            self.load({})

    def load(self, parked: Mapping[str, RestoreMode]) -> None:
        """Take the device's memory, and put these tags to sleep at once. Raises ValueError."""
        size = sum(self.sizes.values())
        if not self.device.take(self.owner, size):
            free = self.device.free_bytes
            raise ValueError(f"{self.owner} needs {size} bytes, {self.device.id} has {free} free")
        self.device.give(self.owner, sum(self.sizes[tag] for tag in parked))
        self.parked = dict(parked)
        self.kept = {tag: self.sizes[tag] for tag, mode in parked.items() if mode.preserves}
        self.written = None if "weights" in parked and "weights" not in self.kept else 0

    def accept(self) -> PhaseReply:
        return _BLANK

    def refuse(self, *refusals: Refusal) -> PhaseReply:
        return replace(_BLANK, ok=False, refusals=refusals)

    def drop_everything(self) -> None:
        self.device.used.pop(self.owner, None)
        self.kept.clear()

    def memory(self) -> tuple[dict[str, object], ...]:
        return tuple(
            {
                "tag": tag,
                "name": tag,
                "parked": tag in self.parked,
                "mode": self.parked.get(tag, self.modes.get(tag, RestoreMode.PINNED)).value,
                "reserved_bytes": size,
                "device_bytes": 0 if tag in self.parked else size,
                "live_bytes": size,
                "host_bytes": self.kept.get(tag, 0),
                "residual_bytes": 0,
            }
            for tag, size in sorted(self.sizes.items())
        )

    def preflight(self, call: PhaseCall, request: OperationRequest) -> PhaseReply:
        wanted = tuple(sorted(self.sizes)) if request.tags is None else request.tags
        unknown = [
            Refusal(RejectCode.UNKNOWN_TAG, f"no tag {tag!r}; there are {', '.join(sorted(self.sizes))}", tag)
            for tag in wanted
            if tag not in self.sizes
        ]
        if unknown:
            return self.refuse(*unknown)
        if self.phase is not LedgerPhase.IDLE:
            return self.refuse(Refusal(RejectCode.CONFLICT, f"operation {self.operation} is {self.phase}"))
        if request.kind is Kind.UPDATE:
            return self._plan_update(call, request)
        if not request.kind.moves_memory:
            self._plan = _Plan(call.operation, request.kind, (), {})
            return replace(_BLANK, digest=self._plan.digest)
        sleep = request.kind is Kind.SLEEP
        tags = tuple(tag for tag in wanted if (tag in self.parked) is not sleep)
        modes = {tag: request.restore.get(tag, self.modes.get(tag, RestoreMode.PINNED)) for tag in tags}
        reload = "weights" in wanted and self._reloads(request)
        self._plan = _Plan(call.operation, request.kind, tags, modes, reload)
        size = sum(self.sizes[tag] for tag in tags)
        if self.looks_ahead and not sleep and size > self.device.free_bytes:
            return self.refuse(self._no_room(size))
        kept = sum(self.sizes[tag] for tag in tags if sleep and modes[tag].preserves)
        return replace(
            _BLANK,
            digest=self._plan.digest,
            freed_bytes=size if sleep else 0,
            device_bytes=0 if sleep else size,
            kept_bytes=kept,
            host_bytes=kept,
            reload_bytes=self.sizes["weights"] if reload else 0,
            modes={tag: mode.value for tag, mode in modes.items()},
        )

    def _reloads(self, request: OperationRequest) -> bool:
        discarded = "weights" in self.parked and not self.parked["weights"].preserves
        allowed = self.weights_version == 0 or request.accept_stale_weights
        wanted = request.kind is Kind.WAKE and request.on_discard is OnDiscard.RELOAD
        return wanted and allowed and (discarded or "weights" in self.undefined)

    def _plan_update(self, call: PhaseCall, request: OperationRequest) -> PhaseReply:
        if "weights" in self.parked:
            return self.refuse(
                Refusal(RejectCode.WRONG_STATE, "the weights are asleep; wake them first", "weights")
            )
        self._plan = _Plan(call.operation, Kind.UPDATE, (), {})
        return replace(_BLANK, digest=f"update:{request.weights_path or request.weights_handed}")

    def stage(self, call: PhaseCall) -> PhaseReply:
        if self.operation == call.operation and self.phase is LedgerPhase.STAGED:
            return _BLANK
        plan = self._plan
        if plan is None or plan.operation != call.operation:
            return self.refuse(Refusal(RejectCode.REFUSED, "no plan of this operation; start it anew"))
        if plan.kind is Kind.SLEEP:
            self.kept.update({tag: self.sizes[tag] for tag in plan.tags if plan.modes[tag].preserves})
        else:
            size = self._size(plan)
            if not self.device.take(self.owner, size):
                return self.refuse(self._no_room(size))
        self.phase, self.operation, self.kind = LedgerPhase.STAGED, call.operation, plan.kind
        return replace(_BLANK, digest=plan.digest, kept_bytes=sum(self.kept.get(tag, 0) for tag in plan.tags))

    def commit(self, call: PhaseCall) -> PhaseReply:
        if self.operation == call.operation and self.phase in (LedgerPhase.COMMITTED, LedgerPhase.IDLE):
            return self._committed
        plan = self._plan
        if plan is None or self.operation != call.operation or self.phase is not LedgerPhase.STAGED:
            return self.refuse(Refusal(RejectCode.REFUSED, f"operation {call.operation} is not staged"))
        size = self._size(plan)
        if plan.kind is Kind.UPDATE:
            self.weights_version += 1
            self.written = self.weights_version
            self.undefined.discard("weights")
        elif plan.kind in (Kind.PAUSE, Kind.UNPAUSE):
            self.paused = plan.kind is Kind.PAUSE
        elif plan.kind is Kind.RESET:
            self.resets += 1
        elif plan.kind is Kind.SLEEP:
            self.device.give(self.owner, size)
            self.parked.update({tag: plan.modes[tag] for tag in plan.tags})
            if "weights" in plan.tags and not plan.modes["weights"].preserves:
                self.written = None
        else:
            for tag in plan.tags:
                if tag == "weights" and not self.parked[tag].preserves:
                    self.undefined.add(tag)
                del self.parked[tag]
            if plan.reload:
                self.undefined.discard("weights")
                self.weights_version = self.written = 0
        self.phase = LedgerPhase.COMMITTED
        sleep = plan.kind is Kind.SLEEP
        self._committed = replace(
            _BLANK,
            freed_bytes=size if sleep else 0,
            device_bytes=0 if sleep else size,
            kept_bytes=sum(self.kept.get(tag, 0) for tag in plan.tags),
        )
        return self._committed

    def publish(self, call: PhaseCall) -> PhaseReply:
        if self.phase is LedgerPhase.COMMITTED and self.operation == call.operation:
            if self._plan is not None and self._plan.kind is Kind.WAKE:
                for tag in self._plan.tags:
                    self.kept.pop(tag, None)
            self.phase, self._plan = LedgerPhase.IDLE, None
        elif self.phase is not LedgerPhase.IDLE:
            return self.refuse(Refusal(RejectCode.REFUSED, f"operation {self.operation} is {self.phase}"))
        return _BLANK

    def abort(self, call: PhaseCall) -> PhaseReply:
        if self.phase is LedgerPhase.COMMITTED and self.operation == call.operation:
            return self.refuse(Refusal(RejectCode.REFUSED, f"operation {call.operation} is committed"))
        plan = self._plan
        if plan is None or plan.operation != call.operation:
            return _BLANK
        if self.phase is LedgerPhase.STAGED:
            if plan.kind is Kind.SLEEP:
                for tag in plan.tags:
                    self.kept.pop(tag, None)
            else:
                self.device.give(self.owner, self._size(plan))
            self.phase, self.operation, self.kind = LedgerPhase.IDLE, None, None
        self._plan = None
        return _BLANK

    def _no_room(self, size: int) -> Refusal:
        free = self.device.free_bytes
        why = f"needed {size} bytes, free {free} on {self.device.id}; sleep another model first"
        return Refusal(RejectCode.DEVICE_MEMORY, why, needed_bytes=size, free_bytes=free)

    def _size(self, plan: _Plan) -> int:
        return sum(self.sizes[tag] for tag in plan.tags)
