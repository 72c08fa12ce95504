"""What an engine has chosen by itself is to be seen from outside: GET /models/{model}, and `torpor status`."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from service_engine_rig import real_rig
from service_rig import Rig

from torpor.actors.messages import EngineChoices
from torpor.service.cli import tables
from torpor.service.wire import model_json


def shown(record: dict[str, object]) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(tables.models([record]))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


async def test_a_real_engine_tells_its_attention_and_why_it_has_no_graphs(tmp_path: Path) -> None:
    async with real_rig(tmp_path) as (_, http, _):
        record = (await http.get("/models/chat")).json()
        (rank,) = record["ranks"]
        assert rank["engine"] == {
            "attention": "torch",
            "collectives": "",
            "cuda_graphs": False,
            "graphs_off": "a host device has none",
        }
        assert rank["manager"] == "torpor.native"
        assert (rank["device"]["kind"], rank["device"]["allocator"]) == ("host", "memfd")
        assert rank["device"]["kernels"] == "not a GPU"
        assert "Engine: attention by torch; no CUDA graphs: a host device has none" in shown(record)


async def test_one_that_does_not_tell_is_shown_without(rig: Rig) -> None:
    record = (await rig.http.get("/models/chat")).json()
    assert record["ranks"][0]["engine"]["graphs_off"] is None
    assert "Engine" not in shown(record)


async def test_ranks_that_chose_alike_are_told_once_and_graphs_are_told_too(wide_rig: Rig) -> None:
    view = await wide_rig.coordinator.model("chat")
    chosen = EngineChoices("triton", "nccl", graphs_off="")
    view.ranks = [replace(rank, engine=chosen) for rank in view.ranks]
    record = model_json(view)
    assert len(record["ranks"]) == 3 and record["ranks"][0]["engine"]["cuda_graphs"] is True
    line = "Engine: attention by triton; sums over ranks by nccl; decodes by CUDA graphs"
    assert shown(record).count("Engine:") == shown(record).count(line) == 1
