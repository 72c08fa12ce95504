"""Operations as tables: readable in 80 columns, with ids that can be copied, and named for what they tell."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType

from torpor.service.cli import tables

ID = "op-5f1ef1e661c74f34850e7ae557daeb73"
RANK = {"rank": 0, "outcome": "committed", "freed_bytes": 0, "kept_bytes": 512 << 20, "reason": None}


def operation(**changes: Any) -> dict[str, Any]:
    record = {
        "id": ID,
        "kind": "sleep",
        "model": "llama-3-8b",
        "state": "succeeded",
        "tags": ["cuda_graph", "kv_cache", "weights", "workspace"],
        "created_at": 1.0,
        "finished_at": 2.5,
        "reason": None,
        "dry_run": False,
        "prefix_tokens_lost": 0,
        "phases": [],
        "ranks": [RANK],
    }
    return record | changes


def lines_of(shown: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_an_id_is_whole_in_80_columns_and_its_tags_and_reason_stand_below() -> None:
    reason = "no tag 'kv'; 'llama-3-8b' has [kv_cache], weights"
    refused = operation(state="rejected", reason=reason, finished_at=None)
    lines = lines_of(
        tables.operations([operation(), refused, operation(model="m" * 64, kind="recover", tags=[])])
    )
    assert [line.split() for line in lines if line.startswith(ID + "  ")] == [
        [ID, "sleep", "llama-3-8b", "succeeded", "1.500"],
        [ID, "sleep", "llama-3-8b", "rejected"],
        [ID, "recover", lines[8].split()[2], "succeeded", "1.500"],
    ]
    assert " ".join(" ".join(lines[3:5]).split()) == "cuda_graph, kv_cache, weights, workspace"
    assert f"{ID}: {reason}" in " ".join(lines)
    assert lines_of(tables.operations([]))[1].split()[0] == "OPERATION"


def test_a_wake_tells_what_it_has_brought_back_and_a_sleep_what_it_has_freed_and_saved() -> None:
    assert lines_of(tables.operation(operation(kind="wake")))[1:] == [
        "RANK  OUTCOME    BROUGHT BACK  REASON",
        "0     committed  512.0 MiB",
    ]
    assert lines_of(tables.operation(operation()))[1:] == [
        "RANK  OUTCOME    FREED  SAVED ANEW  REASON",
        "0     committed  0 B    512.0 MiB",
    ]


def test_where_no_rank_was_asked_there_is_no_table_of_ranks() -> None:
    assert lines_of(tables.operation(operation(kind="recover", ranks=[]))) == [
        f"recover of llama-3-8b: succeeded ({ID})"
    ]
