"""Answers of the service as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from torpor.service.units import show_bytes

Record = Mapping[str, Any]


def models(records: Sequence[Record]) -> RenderableType:
    # What fits into 80 columns; devices are told with the ranks, holds below.
    summary = _table("model", "state", "gate", "parked", "generation", "ranks", title="Models")
    for one in records:
        gate = "open" if one["gate"]["open"] else f"closed: {one['gate']['reason']}"
        parked = ", ".join(one["parked_tags"]) or "-"
        counts = str(one["generation"]), str(one["tensor_parallel"])
        summary.add_row(one["name"], one["state"], gate, parked, *counts)
    errors = [Text(f"{one['name']}: {one['error']}") for one in records if one["error"]]
    holds = [Text(line) for one in records for line in _holds(one)]
    return Group(summary, *errors, *holds, *(_ranks(one) for one in records if one["ranks"]))


def _ranks(model: Record) -> RenderableType:
    told = list(dict.fromkeys(filter(None, (_engine(rank["engine"]) for rank in model["ranks"]))))
    ranks = [Text(_rank(rank)) for rank in model["ranks"]]
    return Group(_memory(model), *ranks, *(Text(f"Engine: {each}") for each in told))


def _rank(rank: Record) -> str:
    """Names of GPUs are too long for a column."""
    device, idle = rank["device"], rank.get("host_idle_bytes", 0)  # servers of before do not tell
    free = f"{show_bytes(device['free_bytes'])} of {show_bytes(device['total_bytes'])} free"
    parts = [f"Rank {rank['rank']} on {device['id']}: {free}" if device["id"] else f"Rank {rank['rank']}"]
    parts += [f"{show_bytes(idle)} of host memory kept idle"] if idle else []
    parts += [rank["error"]] if rank["error"] else []
    return "; ".join(parts)


def _engine(choices: Record) -> str:
    """What it has chosen; "" where it does not tell."""
    parts = [f"attention by {choices['attention']}"] if choices["attention"] else []
    parts += [f"sums over ranks by {choices['collectives']}"] if choices["collectives"] else []
    if choices["graphs_off"] is not None:
        why = choices["graphs_off"]
        parts.append(f"no CUDA graphs: {why}" if why else "decodes by CUDA graphs")
    return "; ".join(parts)


def _holds(model: Record) -> list[str]:
    """Who holds it asleep, and until when (UTC); a line each."""
    lines = []
    for hold in model["holds"]:
        end = ""
        if hold["expires_at"] is not None:
            until = datetime.fromtimestamp(hold["expires_at"], UTC)
            end = f" until {until:%H:%M:%S} UTC, then {hold['on_expiry']}"
        lines.append(f"{model['name']} is held asleep by {hold['by'] or 'unknown'}{end}")
    return lines


def _memory(model: Record) -> Table:
    table = _table("rank", "tag", "on device", "on host", "on disk", title=f"Memory of {model['name']}")
    for rank in model["ranks"]:
        name = str(rank["rank"])
        for row in rank["memory"] or [{"tag": "-", "device_bytes": 0, "host_bytes": 0, "disk_bytes": 0}]:
            sizes = [show_bytes(row[f"{where}_bytes"]) for where in ("device", "host", "disk")]
            table.add_row(name, row["tag"], *sizes)
            name = ""
    return table


def event(event_id: str, kind: str, data: Record) -> str:
    """One line."""
    match kind:
        case "model":
            gate = "open" if data["gate"]["open"] else f"closed: {data['gate']['reason']}"
            what = f"{data['name']} is {data['state']}, gate {gate}"
        case "operation":
            reason = f" ({data['reason']})" if data["reason"] else ""
            what = f"{data['kind']} of {data['model']} {data['state']}{reason}, {data['id']}"
        case "deleted":
            what = f"{data['model']} is deleted"
        case _:
            what = str(data.get("hint", ""))
    return f"{event_id}  {kind:<9}  {what}"


def operation(record: Record) -> RenderableType:
    if "operations" in record:
        return operations(record["operations"])
    parts: list[RenderableType] = [Text(_headline(record), style="bold")]
    parts += [_outcomes(record)] if record["ranks"] else []
    phases = _table("phase", "seconds", "bytes")
    for one in record["phases"]:
        phases.add_row(one["name"], f"{one['seconds']:.4f}", show_bytes(one["bytes"]))
    parts += [phases] if record["phases"] else []
    return Group(*parts)


def _outcomes(record: Record) -> Table:
    """A wake frees nothing, and what is kept is what it brings back."""
    wakes = record["kind"] == "wake"
    # What was saved before, and has not changed since, is kept as well, and costs nothing.
    sizes = ("brought back",) if wakes else ("freed", "saved anew")
    ranks = _table("rank", "outcome", *sizes, "reason")
    for one in record["ranks"]:
        freed, kept = show_bytes(one["freed_bytes"]), show_bytes(one["kept_bytes"])
        told = (kept,) if wakes else (freed, kept)
        ranks.add_row(str(one["rank"]), one["outcome"], *told, escape(one["reason"] or ""))
    return ranks


def trimmed(record: Record) -> RenderableType:
    ranks = _table("rank", "given back")
    for one in record["ranks"]:
        ranks.add_row(str(one["rank"]), show_bytes(one["freed_bytes"]))
    freed = show_bytes(record["freed_bytes"])
    return Group(Text(f"{record['model']}: {freed} given back", style="bold"), ranks)


def operations(records: Sequence[Record]) -> RenderableType:
    """An id is whole in its line, for `torpor cancel`; what may be long stands below."""
    table = _table("operation", "kind", "model", "state", "seconds", title="Operations")
    table.columns[0].width = max((len(one["id"]) for one in records), default=None)
    for one in records:
        seconds = "" if one["finished_at"] is None else f"{one['finished_at'] - one['created_at']:.3f}"
        below = f"\n  {escape(', '.join(one['tags']))}" if one["tags"] else ""
        table.add_row(one["id"] + below, one["kind"], one["model"], one["state"], seconds)
    reasons = [Text(f"{one['id']}: {one['reason']}") for one in records if one["reason"]]
    return Group(table, *reasons)


def audit(entries: Sequence[Record]) -> RenderableType:
    table = _table("when", "caller", "address", "call", "model", "answer", "operation", title="Audit")
    for one in entries:
        when = datetime.fromtimestamp(one["at"]).astimezone().isoformat(" ", "seconds")
        answer = f"{one['status']} {one['code']}".strip()
        who = (escape(one["caller"]), one["address"])
        table.add_row(when, *who, escape(one["call"]), escape(one["model"]), answer, one["operation"])
    return table


# What each action of a plan comes to, for people.
_ACTIONS = {
    "create": "create",
    "recreate": "delete and create",
    "change": "change in place",
    "keep": "-",
    "prune": "delete",
    "leave": "- (not in the file; --prune deletes it)",
}


def plan(record: Record) -> RenderableType:
    """What `torpor apply` is about to do."""
    table = _table("model", "ranks", "action", "because")
    for one in record["steps"]:
        because = "; ".join(_difference(each) for each in one["differences"])
        table.add_row(one["model"], str(one["tensor_parallel"]), _ACTIONS[one["action"]], because)
    for each in record["fixed"]:
        table.add_row("(cluster)", "", "refused", _difference(each))
    return Group(Text(f"Plan; coordinator {record['coordinator']}", style="bold"), table)


_LEVELS = {"ok": "green", "warning": "yellow", "fault": "bold red"}


def doctor(records: Sequence[Record]) -> RenderableType:
    """What `torpor doctor` has found, and below it how each thing is mended."""
    table = _table("check", "is", "found")
    for one in records:
        level = Text(one["level"], style=_LEVELS[one["level"]])
        table.add_row(one["check"], level, escape(one["found"]))
    mends = [Text(f"{one['check']}: {one['mend']}") for one in records if one["mend"]]
    return Group(table, *([Text("To mend", style="bold"), *mends] if mends else [Text("All is well.")]))


def bench(record: Record) -> RenderableType:
    """Milliseconds, medians of the rounds; in brackets the fastest and the slowest pair."""
    title = f"{show_bytes(record['size_bytes'])} on {record['device']}, ms"
    table = _table("contents", "by", "sleep", "wake", "pair", "pair, range", title=title)
    for one in record["rows"]:
        medians = [f"{one[f'{name}_s']['median'] * 1e3:.1f}" for name in ("sleep", "wake", "pair")]
        pair = one["pair_s"]
        span = f"{pair['min'] * 1e3:.1f} to {pair['max'] * 1e3:.1f}"
        table.add_row(one["what"], escape(one["who"]), *medians, span)
    return table


def _difference(record: Record) -> str:
    return escape(f"{record['key']}: {record['old']} → {record['new']}")


def _headline(record: Record) -> str:
    plan = "plan of " if record["dry_run"] else ""
    lost = f"; prefix tokens lost: {record['prefix_tokens_lost']}" if record["prefix_tokens_lost"] else ""
    version = f", weights version {record['weights_version']}" if record.get("weights_version") else ""
    return f"{plan}{record['kind']} of {record['model']}: {record['state']}{version} ({record['id']}){lost}"


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="", box=None, pad_edge=False
    )
    for column in columns:
        table.add_column(column.upper(), overflow="fold")
    return table
