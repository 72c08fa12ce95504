"""From what the ledger says and raises to what is sent: refusals and byte counts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torpor.actors.engine.protocol import WeightsRefused
from torpor.actors.messages import Refusal, RejectCode
from torpor.actors.rank.gate import GateHeld, NotDrained, NotIdle
from torpor.native import (
    ContentsCorrupt,
    DeviceBusy,
    OutOfDeviceMemory,
    OutOfDisk,
    OutOfHostMemory,
    Plan,
    Stopped,
)

CODES: Sequence[tuple[type[BaseException], RejectCode]] = (
    (OutOfDeviceMemory, RejectCode.DEVICE_MEMORY),
    (OutOfHostMemory, RejectCode.HOST_MEMORY),
    (OutOfDisk, RejectCode.DISK_SPACE),
    (ContentsCorrupt, RejectCode.CONTENTS_CORRUPT),
    (DeviceBusy, RejectCode.DEVICE_BUSY),
    (Stopped, RejectCode.CANCELLED),
    (TimeoutError, RejectCode.STAGE_TIMEOUT),
    (NotDrained, RejectCode.DRAIN_TIMEOUT),
    (GateHeld, RejectCode.CONFLICT),
    (NotIdle, RejectCode.NOT_IDLE),
    (WeightsRefused, RejectCode.WEIGHTS_REFUSED),
)

# Tags that a model can't compute without: woken without contents they leave the gate closed (C9).
NEEDS_CONTENTS = frozenset({"weights"})
WITHOUT_CONTENTS = frozenset({"none", "memset"})


def refusal_of(error: BaseException) -> Refusal:
    """What an exception of the native core, the engine or the gate means for the operation."""
    code = next((code for kind, code in CODES if isinstance(error, kind)), RejectCode.REFUSED)
    text = str(error) or type(error).__name__
    reason = text if code is not RejectCode.REFUSED else f"{type(error).__name__}: {text}"
    return Refusal(
        code,
        reason,
        needed_bytes=int(getattr(error, "needed_bytes", 0)),
        free_bytes=int(getattr(error, "free_bytes", 0)),
    )


def refusals_of(plan: Plan) -> tuple[Refusal, ...]:
    """The plan's own refusals. A code that we have no word for keeps its text under `refused`."""
    return tuple(
        Refusal(
            _code(str(row["code"])),
            str(row["reason"]),
            str(row.get("tag", "")),
            int(row.get("needed_bytes", 0)),
            int(row.get("free_bytes", 0)),
        )
        for row in plan.refusals
    )


def shape_digest(plan: Plan) -> str:
    """What the ranks must agree on while traffic still runs: kind, tags and modes, but no counts of pages."""
    rows = sorted((row["tag"], row["name"], bool(row["noop"]), row["mode"]) for row in plan.items)
    return hashlib.sha256(repr((plan.kind, rows)).encode()).hexdigest()[:16]


def is_noop(plan: Plan) -> bool:
    return all(row["noop"] for row in plan.items)


def modes_of(plan: Plan) -> dict[str, str]:
    return {str(row["tag"]): str(row["mode"]) for row in plan.items}


def undefined_by(plan: Plan) -> frozenset[str]:
    """Tags that this wake brings back without the contents that the model needs."""
    if plan.kind != "wake":
        return frozenset()
    return frozenset(
        str(row["tag"])
        for row in plan.items
        if not row["noop"] and row["mode"] in WITHOUT_CONTENTS and row["tag"] in NEEDS_CONTENTS
    )


def residual_of(memory: Sequence[Mapping[str, Any]], tags: Sequence[str] | None) -> dict[str, int]:
    """Device bytes by tag that stay mapped while the tag sleeps."""
    residual: dict[str, int] = {}
    for row in memory:
        if tags is None or row["tag"] in tags:
            residual[row["tag"]] = residual.get(row["tag"], 0) + int(row["residual_bytes"])
    return {tag: size for tag, size in residual.items() if size}


def _code(text: str) -> RejectCode:
    if text == "disk":  # the native core's word
        return RejectCode.DISK_SPACE
    try:
        return RejectCode(text)
    except ValueError:
        return RejectCode.REFUSED
