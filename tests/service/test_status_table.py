"""`torpor status` can be read in a terminal of 80 columns, and in a pipe, which is as wide."""

from __future__ import annotations

import io

from rich.console import Console

from torpor.service.cli import tables

MODEL = {
    "name": "llama-3-8b",
    "state": "asleep",
    "gate": {"open": False, "reason": "asleep"},
    "parked_tags": ["kv_cache", "weights"],
    "generation": 1234,
    "tensor_parallel": 8,
    "devices": [f"cuda:{number}" for number in range(8)],
    "holds": [
        {"by": "trainer-3", "expires_at": 1_800_000_000.0, "on_expiry": "wake"},
        {"by": None, "expires_at": None, "on_expiry": None},
    ],
    "ranks": [],
}


def test_a_model_has_a_line_and_so_has_whoever_holds_it() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(tables.models([MODEL]))
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[1].split() == ["MODEL", "STATE", "GATE", "PARKED", "GENERATION", "RANKS"]
    assert lines[2].startswith("llama-3-8b") and lines[2].split()[-2:] == ["1234", "8"]
    assert lines[3] == "llama-3-8b is held asleep by trainer-3 until 08:00:00 UTC, then wake"
    assert lines[-1] == "llama-3-8b is held asleep by unknown"
