"""The shares of ranks, in threads instead of processes: together they compute what the whole model does."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.engine_host import Oracle, dummy_spec
from support.engine_ranks import Ranks
from support.families import CONFIGS, FAMILIES, write_family

from torpor.actors.config import MIB, EngineConfig, KvCacheConfig
from torpor.actors.engine import ModelRefused
from torpor.actors.engine import shard as sharding
from torpor.actors.engine.families import FAMILIES as SERVED
from torpor.actors.engine.families import check_config
from torpor.actors.engine.loader import read_config
from torpor.actors.engine.shard import Shares, shard
from torpor.actors.engine.source import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS = 2
TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(40)]


class Meeting:
    """A process group of threads: each brings its share, and all leave with the sum."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=30)
        self._shares: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def all_reduce(self, share: torch.Tensor) -> None:
        with self._lock:
            self._shares.append(share.clone())
        self._barrier.wait()
        total = torch.stack(self._shares).sum(dim=0)
        if self._barrier.wait() == 0:
            self._shares.clear()
        self._barrier.wait()
        share.copy_(total)


def divided() -> list[str]:
    types = {one.model_type for one in SERVED if not one.undivided}
    return [family for family in FAMILIES if CONFIGS[family]["model_type"] in types]


@pytest.mark.parametrize("family", divided())
def test_the_shares_of_two_ranks_compute_what_the_whole_model_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(write_family(tmp_path, family, num_attention_heads=6, num_key_value_heads=2))
    expected = oracle.logits(TOKENS)
    monkeypatch.setattr(sharding.dist, "all_reduce", Meeting().all_reduce)
    ranks = [copy.deepcopy(oracle.model) for _ in range(RANKS)]
    for rank, model in enumerate(ranks):
        shard(model, rank, RANKS)
        shares = Shares(model, rank, RANKS)
        for name, parameter in model.named_parameters():
            whole = oracle.model.get_parameter(name)
            assert shares.whole_shape(name, parameter.shape) == tuple(whole.shape), name
            assert torch.equal(shares.cut(name, whole), parameter), name

    def logits(model: torch.nn.Module) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([TOKENS]), use_cache=False).logits[0]

    with ThreadPoolExecutor(RANKS) as pool:
        for computed in pool.map(logits, ranks):
            apart = 3e-6 * float(expected.abs().max())
            torch.testing.assert_close(computed, expected, atol=apart, rtol=0)
    smaller = sum(parameter.numel() for parameter in ranks[0].parameters())
    assert smaller < 0.75 * sum(parameter.numel() for parameter in oracle.model.parameters())


def test_no_family_is_served_over_ranks_untried() -> None:
    assert divided() == ["llama", "qwen3", "mistral", "gemma3", "qwen3_next"]


def test_experts_that_ranks_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    path = write_family(
        tmp_path, "qwen3_next", num_attention_heads=6, num_key_value_heads=2, moe_intermediate_size=33
    )
    config = read_config(resolve(EngineConfig(model=str(path), load_format="dummy")))
    assert check_config(config, 1).model_type == "qwen3_next"
    with pytest.raises(ModelRefused, match="moe_intermediate_size 33, which tensor_parallel 2"):
        check_config(config, 2)


@pytest.mark.long
@pytest.mark.parametrize("family", divided())
def test_two_processes_say_what_the_whole_model_does_also_after_a_sleep(family: str, tmp_path: Path) -> None:
    config = write_family(tmp_path, family, num_attention_heads=6, num_key_value_heads=2)
    oracle = Oracle(config)
    kv = KvCacheConfig(tokens_per_block=8, gpu_bytes=8 * MIB, host_bytes=8 * MIB)
    prompts = [TOKENS[:n] for n in (3, 9, 40)]
    with Ranks(dummy_spec(config, kv=kv, tensor_parallel=RANKS, step_tokens=16)) as ranks:
        for mode in ("pinned", "none"):
            answers = ranks.call(0, "tell_all", prompts, max_tokens=20)
            assert all(oracle.agrees(prompt, said) for prompt, said in zip(prompts, answers, strict=True))
            ranks.call_all("sleep", ["kv_cache"], mode)
            ranks.call_all("wake", ["kv_cache"])
            answer, cached = ranks.call(0, "tell", prompts[2], max_tokens=20)
            assert (answer, cached) == (answers[2], 32 if mode == "pinned" else 0)
