"""Records of the actors as the JSON that HTTP shows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from torpor.actors.messages import ModelView, Operation, RankStatus

MAX_IGNORED = 1000  # characters
MANAGER = "torpor.native"  # of a rank's memory; ours knows no other
ALLOCATORS = {"cuda": "cuMemCreate", "host": "memfd"}  # by kind of device: where its memory comes from


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Fields of a body that mean nothing here; quoted, since they may hold what no header can."""
    told = ", ".join(quote(name, safe="") for name in names)
    return {"Torpor-Ignored": told[:MAX_IGNORED]} if told else {}


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
        "manager": MANAGER if status.loaded else "",
        "ledger_phase": status.ledger_phase,
        "device": {
            "kind": status.device_kind,
            "id": status.device_id,
            "allocator": ALLOCATORS.get(status.device_kind, ""),
            "kernels": status.device_kernels,
            "free_bytes": status.device_free_bytes,
            "total_bytes": status.device_total_bytes,
        },
        "engine": {
            "attention": status.engine.attention,
            "collectives": status.engine.collectives,
            "cuda_graphs": status.engine.graphs_off == "",
            "graphs_off": status.engine.graphs_off,
        },
        "parked_tags": list(status.parked_tags),
        "undefined_tags": list(status.undefined_tags),
        "memory": memory_by_tag(status),
        "host_idle_bytes": status.host_idle_bytes,
        "regions": [dict(row) for row in status.memory],
        "live_sequences": status.live_sequences,
        "frozen_requests": status.frozen_requests,
        "prefix_tokens": status.prefix_tokens,
        "error": status.error,
    }


TIERS = ("device", "host", "disk", "residual")


def memory_by_tag(status: RankStatus) -> list[dict[str, Any]]:
    """[{tag, device_bytes, host_bytes, disk_bytes, residual_bytes}], summed over the rank's regions and managers."""
    sums: dict[str, Counter[str]] = {}
    for row in status.memory:
        by_tier = sums.setdefault(str(row["tag"]), Counter())
        for tier in TIERS:
            by_tier[tier] += int(str(row.get(f"{tier}_bytes") or 0))
    return [{"tag": tag} | {f"{tier}_bytes": sums[tag][tier] for tier in TIERS} for tag in sorted(sums)]
