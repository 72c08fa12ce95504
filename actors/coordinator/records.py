"""Operations, requests and published states as JSON and back; a record filled from its machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from torpor.actors.config import ModelConfig
from torpor.actors.coordinator.gathering import RankSlot
from torpor.actors.coordinator.machine import Machine
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    Hold,
    Kind,
    MakeRoom,
    ModelState,
    OnConflict,
    OnDiscard,
    OnExpiry,
    Operation,
    OperationRequest,
    OperationState,
    Origin,
    Phase,
    PhaseRecord,
    RankOutcome,
    RankRecord,
    RankStatus,
    RejectCode,
    RestoreMode,
)

WITHOUT_CONTENTS = (RestoreMode.NONE.value, RestoreMode.MEMSET.value)
_MODEL = TypeAdapter(ModelConfig)  # making it takes longer than all that is done with it


@dataclass(frozen=True, slots=True)
class Published:
    """What everyone may know of a model between operations. failed: why, or empty."""

    model: str
    tags: tuple[str, ...] = ()
    parked_tags: tuple[str, ...] = ()
    undefined_tags: tuple[str, ...] = ()
    holds: tuple[Hold, ...] = ()
    generation: int = 0
    weights_version: int = 0
    failed: str = ""
    modes: Mapping[str, str] = field(default_factory=dict)  # of the parked tags
    paused: bool = False

    @property
    def hold(self) -> bool:
        return bool(self.holds)

    @property
    def version_there(self) -> int | None:
        """Of the weights whose bytes are there, awake or kept asleep; None where they are without contents (C9)."""
        lost = "weights" in self.undefined_tags or self.modes.get("weights") in WITHOUT_CONTENTS
        return None if lost else self.weights_version

    def awake_again(self) -> Published:
        """What is left of it when its ranks were ended in order."""
        return self.changed(
            parked_tags=(),
            undefined_tags=(),
            modes={},
            holds=(),
            failed="",
            weights_version=0,
            paused=False,
        )

    def changed(self, **fields: Any) -> Published:
        """With these fields; a real change raises the generation."""
        new = replace(self, **fields)
        return self if new == self else replace(new, generation=self.generation + 1)


def published_to_json(published: Published) -> str:
    return json.dumps(asdict(published))


def published_from_json(text: str) -> Published:
    raw = json.loads(text)
    for name in ("tags", "parked_tags", "undefined_tags"):
        raw[name] = tuple(raw[name])
    raw["holds"] = tuple(
        Hold(**{**hold, "on_expiry": OnExpiry(hold["on_expiry"])}) for hold in raw.get("holds", ())
    )
    if raw.pop("hold", False):  # as an earlier version wrote it
        raw["holds"] = (Hold("", "", 0.0),)
    return Published(**raw)


def parked_modes(statuses: Iterable[RankStatus]) -> dict[str, str]:
    """The restore mode of each parked tag, as ranks tell it."""
    rows = [row for status in statuses for row in status.memory if row.get("parked")]
    return {str(row["tag"]): str(row["mode"]) for row in sorted(rows, key=lambda row: str(row["tag"]))}


def request_to_json(request: OperationRequest) -> str:
    return json.dumps(asdict(request), sort_keys=True)


def request_from_json(text: str) -> OperationRequest:
    raw: dict[str, Any] = json.loads(text)
    raw["kind"] = Kind(raw["kind"])
    raw["tags"] = None if raw["tags"] is None else tuple(raw["tags"])
    raw["restore"] = {tag: RestoreMode(mode) for tag, mode in raw["restore"].items()}
    raw["drain"] = DrainSpec(**{**raw["drain"], "mode": DrainMode(raw["drain"]["mode"])})
    raw["on_conflict"] = OnConflict(raw["on_conflict"])
    raw["origin"] = Origin(raw.get("origin", Origin.CALLER))
    raw["on_expiry"] = OnExpiry(raw.get("on_expiry", OnExpiry.KEEP))
    raw["make_room"] = MakeRoom(raw["make_room"]) if raw.get("make_room") else None
    raw["on_discard"] = OnDiscard(raw["on_discard"]) if raw.get("on_discard") else None
    raw["to"] = ModelState(raw["to"]) if raw.get("to") else None
    return OperationRequest(**raw)


# What requests of the first version had. Later fields count where they say something only, so that a key that
# came before an upgrade is known after it.
_FIRST_FIELDS = frozenset(
    {"kind", "model", "tags", "restore", "drain", "overflow", "verify", "dry_run", "on_conflict"}
    | {"wake_on_request", "timeout_s", "idempotency_key"}
)


_FIRST_OF_DRAIN = frozenset({"mode", "timeout_s"})


def _told(body: Mapping[str, Any], plain: Mapping[str, Any], always: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name in always or value != plain[name]}


def fingerprint(request: OperationRequest) -> str:
    """Equal for equal bodies, whatever key they came with; a retry may come from another process."""
    body = asdict(replace(request, idempotency_key=None, caller="", generation=None, traceparent=""))
    plain = asdict(OperationRequest(request.kind, request.model))
    body["drain"] = _told(body["drain"], plain["drain"], _FIRST_OF_DRAIN)
    told = _told(body, plain, _FIRST_FIELDS)
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def model_to_json(model: ModelConfig) -> str:
    return _MODEL.dump_json(model).decode()


def model_from_json(text: str) -> ModelConfig:
    """As it was, also where later versions of this program have added fields."""
    return _MODEL.validate_json(text)


def operation_to_json(operation: Operation) -> str:
    return json.dumps(asdict(operation))


def operation_from_json(text: str) -> Operation:
    raw: dict[str, Any] = json.loads(text)
    raw["kind"] = Kind(raw["kind"])
    raw["state"] = OperationState(raw["state"])
    raw["code"] = None if raw["code"] is None else RejectCode(raw["code"])
    raw["origin"] = Origin(raw.get("origin", Origin.CALLER))
    raw["phases"] = [PhaseRecord(**{**phase, "name": Phase(phase["name"])}) for phase in raw["phases"]]
    raw["ranks"] = [RankRecord(**{**rank, "outcome": RankOutcome(rank["outcome"])}) for rank in raw["ranks"]]
    return Operation(**raw)


def hold_terms(request: OperationRequest) -> tuple[object, ...]:
    """What a sleep is to be besides its memory. Only for equal ones it can be one operation."""
    return (request.origin, request.wake_on_request, request.lease_s, request.on_expiry)


def makes_hold(request: OperationRequest) -> bool:
    """An explicit sleep does, unless it was opted in to wake on request."""
    return request.kind is Kind.SLEEP and request.origin is Origin.CALLER and not request.wake_on_request


def effective_tags(request: OperationRequest, known: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(set(known if request.tags is None else request.tags)))


def same_request(
    one: OperationRequest,
    other: OperationRequest,
    known: tuple[str, ...],
    defaults: Mapping[str, RestoreMode],
) -> bool:
    """Same kind, model, tags and modes, with what is left out filled in: such a request joins the other.

    The drain's mode is one of them: who wants to wait must not be refused since another wanted an idle model. So
    are overflow and verify: who would lose no prefix must not join a sleep that drops some.
    """
    if (one.kind, one.model, one.dry_run) != (other.kind, other.model, other.dry_run):
        return False
    if (one.overflow, one.verify) != (other.overflow, other.verify):
        return False
    if one.releases != other.releases:
        return False
    for name in ("to", "accept_stale_weights", "on_discard"):
        if getattr(one, name) != getattr(other, name):
            return False
    if one.kind in (Kind.UPDATE, Kind.RESET):
        return False  # a path says nothing of what is there now, and what came since is to be forgotten, too
    if one.lease_s is not None:
        return False  # each is to be a hold of its own, which its holder can give up
    tags = effective_tags(one, known)
    if tags != effective_tags(other, known):
        return False
    if one.kind in (Kind.WAKE, Kind.RECOVER):
        return True
    if (hold_terms(one), one.drain.mode) != (hold_terms(other), other.drain.mode):
        return False
    modes = [[request.restore.get(tag, defaults.get(tag)) for tag in tags] for request in (one, other)]
    return modes[0] == modes[1]


def rank_record(slot: RankSlot) -> RankRecord:
    """How far a rank is, without what it has moved."""
    record = RankRecord(slot.rank, outcome=slot.outcome, reason=slot.reason)
    if slot.status is not None:
        record.node, record.device = slot.status.node, slot.status.device_id
    return record


def fill(operation: Operation, machine: Machine) -> None:
    """What the machine knows of ranks, bytes and reasons, into the record that people see."""
    operation.ranks = []
    for slot in machine.slots:
        best = slot.committed or slot.plan
        record = rank_record(slot)
        if best is not None and (slot.committed is not None or machine.request.dry_run):
            record.freed_bytes = best.freed_bytes
            record.residual = dict(best.residual)
            # Ranks may tell the kept bytes with the stage alone.
            record.kept_bytes = best.kept_bytes or (slot.staged.kept_bytes if slot.staged else 0)
        operation.ranks.append(record)
        if slot.plan is not None:
            operation.restore.update(slot.plan.modes)
    told = [r for slot in machine.slots for r in (slot.drained, slot.staged, slot.committed) if r is not None]
    operation.aborted_requests = sum(reply.aborted_requests for reply in told)
    operation.prefix_tokens_lost = max(
        (_prefix_tokens_lost(slot, machine.request.dry_run) for slot in machine.slots), default=0
    )
    if machine.request.dry_run or any(slot.committed is not None for slot in machine.slots):
        operation.reloaded_bytes = machine.gathering.reload_bytes
    if machine.request.dry_run and machine.request.kind is Kind.WAKE:
        operation.needed_bytes = sum(
            slot.plan.device_bytes for slot in machine.slots if slot.plan is not None
        )
    if machine.refusal is not None:
        operation.code, operation.reason = machine.refusal.code, machine.refusal.reason
        if machine.refusal.needed_bytes:
            operation.needed_bytes = machine.refusal.needed_bytes
            operation.free_bytes = machine.refusal.free_bytes


def _prefix_tokens_lost(slot: RankSlot, dry_run: bool) -> int:
    if not dry_run:
        return slot.prefix_tokens_lost
    return slot.plan.prefix_tokens_lost if slot.plan is not None else 0


def phase_bytes(machine: Machine, phase: Phase) -> int:
    """Bytes that a phase moved, freed or took, over all ranks."""
    total = 0
    for slot in machine.slots:
        if phase is Phase.STAGE and slot.staged is not None:
            total += slot.staged.kept_bytes or slot.staged.device_bytes
        elif phase is Phase.COMMIT and slot.committed is not None:
            total += slot.committed.freed_bytes or slot.committed.device_bytes
    return total
