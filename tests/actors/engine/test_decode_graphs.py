"""Decoding in buckets over inputs at fixed addresses, with a stand-in for what a GPU captures.

Real graphs and the kernel are in tests/gpu/test_engine_on_cuda.py.
"""

from __future__ import annotations

import random
import uuid
from pathlib import Path

import pytest
import torch
from support.engine_host import MIB, EngineHost, KvCacheConfig, Oracle, dummy_spec
from support.families import FAMILIES, WITH_STATES, family_spec, write_family
from support.static_reads import TableReads, capture

from torpor.actors.config import EngineConfig
from torpor.actors.engine import ModelRefused
from torpor.actors.engine.decode_graphs import DecodeGraphs, buckets, check_setting, why_off
from torpor.actors.engine.decode_inputs import DecodeInputs
from torpor.actors.engine.families import check_config
from torpor.actors.engine.loader import read_config
from torpor.actors.engine.source import resolve
from torpor.native import Device

pytestmark = pytest.mark.usefixtures("one_thread")


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{length}/{i}").randrange(256) for i in range(length)]


def with_graphs(host: EngineHost, most: int) -> DecodeGraphs:
    """Nothing runs yet."""
    runner = host.engine._loop._runner  # type: ignore[attr-defined]

    def make_memory(size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8)  # undefined, as any memory

    inputs = DecodeInputs(runner._pages, buckets(most)[-1], 512, make_memory, TableReads)
    graphs = DecodeGraphs(inputs, most, capture)
    host.engine.quiesce(10)
    runner.capture(graphs)
    host.engine.resume()
    return graphs


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_token_exact_in_buckets_that_are_not_full(family: str, tmp_path: Path) -> None:
    oracle = Oracle(write_family(tmp_path, family))
    with EngineHost(family_spec(tmp_path, family)) as host:
        graphs = with_graphs(host, 8)
        lengths = (1, 8, 17, 30, 41)
        asked = [host.ask(prompt(n), max_tokens=12 + 3 * i) for i, n in enumerate(lengths)]
        for n, said in zip(lengths, asked, strict=True):
            assert oracle.agrees(prompt(n), said.wait().tokens), n
        assert graphs.replays > 12
        assert host.engine.error() == ""


@pytest.mark.parametrize("family", ["mistral", "granite_hybrid"])
def test_pages_that_move_while_sequences_are_preempted_are_read_where_they_are_s1_s2(
    family: str, tmp_path: Path
) -> None:
    config = write_family(tmp_path, family, max_position_embeddings=96 if family in WITH_STATES else 512)
    gpu_bytes = (64 if family == "mistral" else 128) << 10
    kv = KvCacheConfig(tokens_per_block=8, gpu_bytes=gpu_bytes, host_bytes=2 * MIB)
    device = Device.host(f"graphs-{uuid.uuid4().hex[:12]}", 32 * MIB, granularity_bytes=16 << 10)
    oracle = Oracle(config)
    with EngineHost(dummy_spec(config, kv=kv, step_tokens=8), device=device) as host:
        graphs = with_graphs(host, 4)
        asked = [host.ask(prompt(20 + i, seed=i), max_tokens=40) for i in range(8)]
        for i, said in enumerate(asked):
            assert oracle.agrees(prompt(20 + i, seed=i), said.wait().tokens), said.last
        assert host.engine._loop._scheduler.preemptions > 0  # type: ignore[attr-defined]
        assert graphs.replays > 0
        assert host.engine.error() == ""


def test_buckets_hold_all_that_run_up_to_a_bound() -> None:
    assert [buckets(most) for most in (1, 2, 3, 8, 9)] == [
        [1],
        [1, 2],
        [1, 2, 4],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 16],
    ]
    assert buckets(1000)[-1] == 256


@pytest.mark.parametrize(
    ("family", "changes", "where", "reason"),
    [
        ("llama", {}, {}, ""),
        ("llama", {}, {"ranks": 2}, "gloo"),
        ("llama", {}, {"device": "cpu"}, "a host device has none"),
        ("llama", {}, {"attention": "torch"}, "attention by torch"),
        ("llama", {}, {"engine": EngineConfig(cuda_graphs="off")}, "engine.cuda_graphs is off"),
        ("granite_hybrid", {}, {}, ""),
        ("granite_hybrid", {"num_local_experts": 2}, {}, "experts"),
        ("gpt_oss", {}, {}, "experts"),
        ("qwen3_next", {}, {}, "experts"),
        ("lfm2", {}, {}, ""),
    ],
)
def test_a_model_that_decodes_without_graphs_says_why(
    family: str, changes: dict[str, object], where: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = write_family(tmp_path, family, **changes)
    config = read_config(resolve(EngineConfig(model=str(path), load_format="dummy")))
    usual = {"engine": EngineConfig(), "ranks": 1, "device": "cuda", "attention": "triton"}
    said = why_off(family=check_config(config, 1), config=config, **(usual | where))  # type: ignore[arg-type]
    assert reason in said and bool(reason) == bool(said)


def test_a_setting_of_graphs_that_means_nothing_is_refused_and_a_host_engine_says_that_it_has_none(
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelRefused, match="'on' is unknown; known: auto, off"):
        check_setting("on")
    with EngineHost(family_spec(tmp_path, "llama")) as host:
        assert host.engine.graphs_off == "a host device has none"  # type: ignore[attr-defined]
