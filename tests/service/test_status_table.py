"""`torpor status` can be read in a terminal of 80 columns, and in a pipe, which is as wide."""

from __future__ import annotations

import io
from typing import Any

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
    "error": "",
    "ranks": [],
}


def rank(number: int, error: str = "", idle_bytes: int = 0) -> dict[str, Any]:
    device = {
        "id": f"GPU-5bdb21bd-0f4c-4a5a-9540-3545924ee8a{number}",
        "free_bytes": 20 << 30,
        "total_bytes": 139 << 30,
    }
    memory = [
        {"tag": tag, "device_bytes": 100 << 30, "host_bytes": 0, "disk_bytes": 0}
        for tag in ("cuda_graph", "weights")
    ]
    engine = {"attention": "triton", "collectives": "nccl", "graphs_off": ""}
    told = {"device": device, "memory": memory, "engine": engine}
    return told | {"rank": number, "error": error, "host_idle_bytes": idle_bytes}


def lines_of(*records: dict[str, Any]) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(tables.models(records))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_model_has_a_line_and_so_has_whoever_holds_it() -> None:
    lines = lines_of(MODEL)
    assert lines[1].split() == ["MODEL", "STATE", "GATE", "PARKED", "GENERATION", "RANKS"]
    assert lines[2].startswith("llama-3-8b") and lines[2].split()[-2:] == ["1234", "8"]
    assert lines[3] == "llama-3-8b is held asleep by trainer-3 until 08:00:00 UTC, then wake"
    assert lines[-1] == "llama-3-8b is held asleep by unknown"


def test_each_rank_has_a_line_for_its_device_and_one_for_each_tag() -> None:
    lines = lines_of(MODEL | {"ranks": [rank(0), rank(1, idle_bytes=3 << 30)]})
    start = lines.index("Memory of llama-3-8b")
    assert [line.split() for line in lines[start + 1 : start + 6]] == [
        ["RANK", "TAG", "ON", "DEVICE", "ON", "HOST", "ON", "DISK"],
        ["0", "cuda_graph", "100.0", "GiB", "0", "B", "0", "B"],
        ["weights", "100.0", "GiB", "0", "B", "0", "B"],
        ["1", "cuda_graph", "100.0", "GiB", "0", "B", "0", "B"],
        ["weights", "100.0", "GiB", "0", "B", "0", "B"],
    ]
    uuid = "GPU-5bdb21bd-0f4c-4a5a-9540-3545924ee8a"
    assert lines[start + 6] == f"Rank 0 on {uuid}0: 20.0 GiB of 139.0 GiB free"
    assert " ".join(lines[start + 7 : start + 9]) == (
        f"Rank 1 on {uuid}1: 20.0 GiB of 139.0 GiB free; 3.0 GiB of host memory kept idle"
    )


def test_why_a_model_or_a_rank_is_unwell_is_said() -> None:
    silent = rank(1, error="unknown: no answer within 2 s")
    text = " ".join(
        lines_of(MODEL | {"error": "rank 0 is gone: the process was killed", "ranks": [rank(0), silent]})
    )
    assert "llama-3-8b: rank 0 is gone: the process was killed" in text
    assert "free; unknown: no answer within 2 s" in text
