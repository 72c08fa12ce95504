"""The shapes that answers name: those of the actors' own messages, changed where the wire changes them."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from torpor.actors.audit import AuditEntry
from torpor.actors.messages import ModelView, Operation, RejectCode
from torpor.service.docs import PROBLEM_SCHEMA
from torpor.service.problems import Code

Schema = dict[str, Any]
_REFERENCE = "#/components/schemas/{model}"
_BYTES = {"type": "integer", "minimum": 0}


def reference(name: str) -> Schema:
    return {"$ref": _REFERENCE.format(model=name)}


def shapes() -> dict[str, Schema]:
    """All components, by name."""
    made = _of("Operation", Operation) | _of("Model", ModelView) | _of("AuditEntry", AuditEntry)
    _as_on_the_wire(made["Model"])
    for unseen in (
        "RankStatus",
        "EngineChoices",
        "LedgerPhase",
    ):  # what a rank tells the coordinator; `Rank` is what is shown of it
        made.pop(unseen, None)
    made["Rank"] = _rank()
    made["RenewedHold"] = _renewed(made["Hold"])
    made["Models"] = _listed("models", "Model")
    made["Operations"] = _listed("operations", "Operation")
    made["OperationOrOperations"] = {"anyOf": [reference("Operation"), reference("Operations")]}
    made["Audit"] = _listed("audit", "AuditEntry")
    made["Status"] = _record({"status": {"type": "string"}})
    made["Completion"] = _record(
        {name: {"type": "string"} for name in ("id", "object", "model")}
        | {"created": {"type": "integer"}, "choices": {"type": "array", "items": {"type": "object"}}}
        | {"usage": {"type": "object"}}
    )
    trimmed = _record({"rank": _BYTES, "freed_bytes": _BYTES, "error": {"type": "string"}})
    made["Trimmed"] = _record(
        {"model": {"type": "string"}, "freed_bytes": _BYTES, "ranks": {"type": "array", "items": trimmed}}
    )
    made["Object"] = {"type": "object"}
    codes = sorted({str(code) for code in (*Code, *RejectCode)})
    made["Problem"] = PROBLEM_SCHEMA | {
        "properties": PROBLEM_SCHEMA["properties"] | {"code": {"type": "string", "enum": codes}}
    }
    return made


def _of(name: str, kind: Any) -> dict[str, Schema]:
    schema = TypeAdapter(kind).json_schema(ref_template=_REFERENCE, mode="serialization")
    return {**schema.pop("$defs", {}), name: schema}


def _as_on_the_wire(model: Schema) -> None:
    """As wire.model_json makes it."""
    properties = model["properties"]
    properties["gate"] = _record(
        {"open": properties.pop("gate_open"), "reason": properties.pop("gate_reason")}
    )
    properties["ranks"] = {"type": "array", "items": reference("Rank")}
    kept = [name for name in model["required"] if not name.startswith("gate_")]
    model["required"] = [*kept, "gate", "ranks"]


def _rank() -> Schema:
    """As wire.rank_json makes it."""
    texts = {name: {"type": "string"} for name in ("node", "incarnation", "manager", "ledger_phase", "error")}
    names = ("rank", "pid", "live_sequences", "frozen_requests", "prefix_tokens", "host_idle_bytes")
    numbers = dict.fromkeys(names, _BYTES)
    device = {
        "kind": {"type": "string"},
        "id": {"type": "string"},
        "allocator": {"type": "string"},
        "kernels": {"type": "string"},
        "free_bytes": _BYTES,
        "total_bytes": _BYTES,
    }
    engine: Schema = {"attention": {"type": "string"}, "collectives": {"type": "string"}}
    engine |= {"cuda_graphs": {"type": "boolean"}, "graphs_off": {"type": ["string", "null"]}}
    memory = {f"{tier}_bytes": _BYTES for tier in ("device", "host", "disk", "residual")}
    tags = {"type": "array", "items": {"type": "string"}}
    return _record(
        texts
        | numbers
        | {"loaded": {"type": "boolean"}, "parked_tags": tags, "undefined_tags": tags}
        | {"device": _record(device), "engine": _record(engine)}
        | {"memory": {"type": "array", "items": _record({"tag": {"type": "string"}} | memory)}}
        | {"regions": {"type": "array", "items": {"type": "object"}}}
    )


def _renewed(hold: Schema) -> Schema:
    return hold | {"properties": {"model": {"type": "string"}} | hold["properties"]}


def _listed(name: str, what: str) -> Schema:
    return _record({name: {"type": "array", "items": reference(what)}})


def _record(properties: dict[str, Any]) -> Schema:
    return {"type": "object", "required": sorted(properties), "properties": properties}
