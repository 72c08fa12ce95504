"""Records of the actors as the JSON that HTTP shows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from torpor.actors.messages import ModelView, Operation, RankStatus


def operation_json(operation: Operation) -> dict[str, Any]:
    return dataclasses.asdict(operation)


def model_json(view: ModelView) -> dict[str, Any]:
    """`gate` is open, or closed with a reason; `memory` of a rank is bytes by tag and tier."""
    body = dataclasses.asdict(view)
    body["gate"] = {"open": body.pop("gate_open"), "reason": body.pop("gate_reason")}
    body["ranks"] = [rank_json(status) for status in view.ranks]
    return body


def rank_json(status: RankStatus) -> dict[str, Any]:
    return {
        "rank": status.rank,
        "node": status.node,
        "pid": status.pid,
        "incarnation": status.incarnation,
        "loaded": status.loaded,
        "ledger_phase": status.ledger_phase,
        "device": {
            "kind": status.device_kind,
            "id": status.device_id,
            "free_bytes": status.device_free_bytes,
            "total_bytes": status.device_total_bytes,
        },
        "parked_tags": list(status.parked_tags),
        "undefined_tags": list(status.undefined_tags),
        "memory": memory_by_tag(status),
        "regions": [dict(row) for row in status.memory],
        "live_sequences": status.live_sequences,
        "prefix_tokens": status.prefix_tokens,
        "error": status.error,
    }


TIERS = {"device": "device_bytes", "host": "host_bytes", "residual": "residual_bytes"}


def memory_by_tag(status: RankStatus) -> dict[str, dict[str, int]]:
    """{tag: {device, host, residual}} in bytes, summed over the rank's regions and managers."""
    by_tag: dict[str, Counter[str]] = {}
    for row in status.memory:
        tiers = by_tag.setdefault(str(row["tag"]), Counter())
        for tier, column in TIERS.items():
            tiers[tier] += int(str(row.get(column) or 0))
    return {tag: {tier: tiers[tier] for tier in TIERS} for tag, tiers in sorted(by_tag.items())}
