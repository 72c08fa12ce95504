"""Decoding in buckets over inputs at fixed addresses, with a stand-in for what a GPU captures.

Real graphs and the kernel are in tests/gpu/test_engine_on_cuda.py.
"""

from __future__ import annotations

import random
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.engine_host import MIB, EngineHost, KvCacheConfig, Oracle, dummy_spec
from support.families import FAMILIES, WITH_STATES, family_spec, write_family
from support.static_reads import TableReads, capture

from torpor.actors.config import EngineConfig, GateConfig
from torpor.actors.engine import ModelRefused, decoding
from torpor.actors.engine.batch import PagedBatch
from torpor.actors.engine.decode_graphs import DecodeGraphs, buckets, check_setting, why_off
from torpor.actors.engine.decode_inputs import DecodeInputs
from torpor.actors.engine.decoding import lines_of
from torpor.actors.engine.experts import COPIED, GROUPED, CapturedExperts, captured_experts, has_experts
from torpor.actors.engine.families import check_config
from torpor.actors.engine.plan import Chunk
from torpor.native import Device

pytestmark = pytest.mark.usefixtures("one_thread")


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{length}/{i}").randrange(256) for i in range(length)]


def with_graphs(host: EngineHost, most: int) -> DecodeGraphs:
    """Nothing runs yet."""
    runner = host.engine._loop._runner  # type: ignore[attr-defined]

    def make_memory(size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8)  # undefined, as any memory

    module, config = runner._module, runner._module.config
    inputs = DecodeInputs(runner._pages, buckets(most)[-1], 512, make_memory, TableReads)
    options = {}
    if has_experts(check_config(config, 1), config):
        options["computing"] = captured_experts(module, config, torch.float32, torch.device("cpu")).computing
    graphs = DecodeGraphs(inputs, most, capture, **options)
    host.engine.quiesce(10)
    runner.capture(graphs)
    host.engine.resume()
    return graphs


@pytest.mark.parametrize("most", [8, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_token_exact_in_buckets_that_are_not_full(
    family: str, most: int, tmp_path: Path
) -> None:
    """Of 32 lines, prompts are read by them, too, where there are no states."""
    oracle = Oracle(write_family(tmp_path, family))
    with EngineHost(family_spec(tmp_path, family)) as host:
        graphs = with_graphs(host, most)
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


@pytest.mark.parametrize("family", ["llama", "mistral", "lfm2"])
def test_what_is_left_of_a_known_prompt_is_read_by_one_replay_where_there_are_no_states(
    family: str, tmp_path: Path
) -> None:
    """States of one sequence come one after the other."""
    oracle = Oracle(write_family(tmp_path, family))
    with EngineHost(family_spec(tmp_path, family)) as host:
        graphs = with_graphs(host, 32)
        host.tell(prompt(40), max_tokens=1)
        before = graphs.replays
        said = host.tell(prompt(40), max_tokens=1)
        assert said.cached == 32 and oracle.agrees(prompt(40), said.tokens)
        assert graphs.replays == before + (family not in WITH_STATES)
        long = host.tell(prompt(90, seed=3), max_tokens=1)  # 16 at a time, the last 10 by lines, too
        assert oracle.agrees(prompt(90, seed=3), long.tokens)
        assert graphs.replays == before + 7 * (family not in WITH_STATES)


def test_a_replay_gives_logits_where_they_are_wanted_and_a_follower_none(tmp_path: Path) -> None:
    """Of a step with a piece of a prompt, another's end, and a follower's same step."""
    with EngineHost(family_spec(tmp_path, "llama")) as host:
        graphs = with_graphs(host, 32)
        host.engine.quiesce(10)
        runner, book = host.engine._loop._runner, host.engine._book  # type: ignore[attr-defined]
        texts = {10**6: prompt(12), 10**6 + 1: prompt(9, seed=1), 10**6 + 2: prompt(1, seed=2)}
        for key, text in texts.items():
            book.create(key, "", text)
            assert book.resume(key) and book.resize(key, len(text))
        chunks = [Chunk(key, 0, tuple(text), key != 10**6) for key, text in texts.items()]
        rows = runner.forward(chunks)
        assert graphs.replays == 1
        oracle = Oracle(write_family(tmp_path, "llama"))
        expected = torch.stack([oracle.logits(text)[-1] for text in list(texts.values())[1:]])
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
        assert runner.forward([replace(chunk, wants_logits=False) for chunk in chunks]) is None
        runner._makes_logits = False
        assert runner.forward(chunks) is None
        assert graphs.replays == 3
        for key in texts:
            book.close(key)
        host.engine.resume()


@pytest.mark.parametrize(
    ("family", "changes"), [("gpt_oss", {}), ("qwen3_next", {}), ("granite_hybrid", {"num_local_experts": 2})]
)
def test_experts_compute_without_the_host_in_a_replay_and_as_before_outside(
    family: str, changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    path = write_family(tmp_path, family, **changes)
    spec = dummy_spec(path, kv=KvCacheConfig(8, 8 * MIB, 8 * MIB), step_tokens=16)
    with EngineHost(spec) as host:
        runner = host.engine._loop._runner  # type: ignore[attr-defined]
        before, run = runner._module.config._experts_implementation, runner._run

        def watched(batch: PagedBatch) -> torch.Tensor | None:
            seen.append(runner._module.config._experts_implementation)
            return run(batch)

        monkeypatch.setattr(runner, "_run", watched)
        graphs = with_graphs(host, 4)
        seen.clear()
        said = host.tell(prompt(20), max_tokens=8)
        assert Oracle(path).agrees(prompt(20), said.tokens)
        reading = 2 if family in WITH_STATES else 1  # steps; the second one's tokens fit the bucket of 4
        assert seen == [before] * reading + [COPIED] * graphs.replays
        assert graphs.replays == 9 - reading and before != COPIED


def test_few_lines_copy_their_experts_and_more_are_grouped_only_where_the_device_can() -> None:
    class Switched:
        now = "grouped_mm"

        def get_experts_implementation(self) -> str:
            return self.now

        def set_experts_implementation(self, wanted: str) -> None:
            self.now = wanted

    module = Switched()
    host = CapturedExperts(module, 4, 50 * MIB, groups_on_device=False)
    assert (host.most_lines, host.way(5)) == (5, COPIED)
    assert [lines_of(most, False, host) for most in (1, 64)] == [4, 4]
    hopper = CapturedExperts(module, 4, 50 * MIB, groups_on_device=True)
    assert (hopper.most_lines, hopper.way(5), hopper.way(6)) == (None, COPIED, GROUPED)
    assert [lines_of(most, False, hopper) for most in (1, 64)] == [32, 64]
    assert [lines_of(most, True, None) for most in (1, 64)] == [1, 64]
    huge = CapturedExperts(module, 4, 1 << 30, groups_on_device=False)
    assert lines_of(64, False, huge) == 0
    with pytest.raises(ZeroDivisionError), host.computing(3):
        assert module.now == COPIED
        raise ZeroDivisionError
    assert module.now == "grouped_mm"


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
    ("where", "reason"),
    [
        ({}, ""),
        ({"ranks": 2}, "gloo"),
        ({"ranks": 2, "engine": EngineConfig(cuda_graphs="on")}, "gloo"),
        ({"ranks": 2, "backend": "nccl"}, "captured on no GPU yet"),
        ({"ranks": 2, "backend": "nccl", "engine": EngineConfig(cuda_graphs="on")}, ""),
        ({"device": "cpu"}, "a host device has none"),
        ({"attention": "torch"}, "attention by torch"),
        ({"engine": EngineConfig(cuda_graphs="off")}, "engine.cuda_graphs is off"),
    ],
)
def test_a_model_that_decodes_without_graphs_says_why(where: dict[str, object], reason: str) -> None:
    usual = {
        "engine": EngineConfig(),
        "ranks": 1,
        "device": "cuda",
        "attention": "triton",
        "backend": "gloo",
    }
    said = why_off(**(usual | where))  # type: ignore[arg-type]
    assert reason in said and bool(reason) == bool(said)


class BrokenCapture:
    kind: type[RuntimeError] = RuntimeError  # not one error for all: it would keep what its frames hold
    text = "operation not permitted when stream is capturing\nand more"

    def __init__(self, *_: object) -> None: ...

    def __call__(self, _: object) -> None:
        raise self.kind(self.text)


def test_a_model_whose_capture_fails_serves_without_graphs_unless_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "why_off", lambda *_: "")
    monkeypatch.setattr(decoding, "CudaCapture", BrokenCapture)
    # Without a GPU there is no triton, which this module needs.
    monkeypatch.setitem(sys.modules, "torpor.actors.engine.tiled", SimpleNamespace(read_singles=TableReads))
    oracle = Oracle(write_family(tmp_path, "llama"))
    with EngineHost(family_spec(tmp_path, "llama")) as host:
        why = "capturing failed: operation not permitted when stream is capturing"
        assert host.engine.graphs_off == why  # type: ignore[attr-defined]
        assert oracle.agrees(prompt(20), host.tell(prompt(20), max_tokens=8).tokens)
    with (
        pytest.raises(RuntimeError, match="not permitted"),
        EngineHost(family_spec(tmp_path, "llama", cuda_graphs="on")),
    ):
        pass
    monkeypatch.setattr(BrokenCapture, "kind", torch.OutOfMemoryError)
    monkeypatch.setattr(BrokenCapture, "text", "CUDA out of memory")
    spec = family_spec(tmp_path, "llama")
    with EngineHost(spec) as host:
        assert host.engine.graphs_off == "capturing failed: CUDA out of memory"  # type: ignore[attr-defined]
    yielded_to = replace(spec.model, gate=GateConfig(make_room="idle"))
    with pytest.raises(torch.OutOfMemoryError), EngineHost(replace(spec, model=yielded_to)):
        pass


def test_a_setting_of_graphs_that_means_nothing_is_refused_and_a_host_engine_says_that_it_has_none(
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelRefused, match="'always' is unknown; known: auto, on, off"):
        check_setting("always")
    with EngineHost(family_spec(tmp_path, "llama")) as host:
        assert host.engine.graphs_off == "a host device has none"  # type: ignore[attr-defined]
