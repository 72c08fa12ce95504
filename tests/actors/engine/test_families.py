"""Every family token for token as the uncached full forward: chunks, batches, prefixes, pools that are too small."""

from __future__ import annotations

import json
import random
import uuid
from pathlib import Path

import pytest
import torch
from support.engine_host import MIB, EngineHost, KvCacheConfig, Oracle, dummy_spec
from support.families import FAMILIES, MOST_PARAMETERS, WITH_STATES, family_spec, write_family

from torpor.actors.config import EngineConfig
from torpor.actors.engine import ModelRefused
from torpor.actors.engine.families import FAMILIES as SERVED
from torpor.actors.engine.families import check_config
from torpor.actors.engine.loader import read_config
from torpor.actors.engine.source import resolve
from torpor.native import Device

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 7, 8, 9, 17, 50, 90)  # on and off the borders of blocks, chunks and windows
WINDOWED = ("mistral", "gemma3", "gpt_oss")


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{length}/{i}").randrange(256) for i in range(length)]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def oracle(family: str, tmp_path: Path) -> Oracle:
    return Oracle(write_family(tmp_path, family))


def test_texts_alone_and_in_a_crowd_and_behind_known_prefixes_are_token_exact(
    family: str, oracle: Oracle, tmp_path: Path
) -> None:
    """Fresh memory may hold anything, also what is no number. States are found again at multiples of a step's tokens,
    and at the last border of a prompt."""
    assert sum(parameter.numel() for parameter in oracle.model.parameters()) < MOST_PARAMETERS
    with EngineHost(family_spec(tmp_path, family)) as host:
        pages = host.engine._loop._runner._pages  # type: ignore[attr-defined]
        states = [view for layer in pages.states.values() for view in layer.values()]
        assert bool(states) == (family in WITH_STATES)
        for pool in (*pages.keys.values(), *pages.values.values(), *states):
            pool.fill_(float("nan"))
        asked = [host.ask(prompt(n), max_tokens=20) for n in LENGTHS]
        for n, said in zip(LENGTHS, asked, strict=True):
            assert oracle.agrees(prompt(n), said.wait().tokens), n
        assert len(set(said.tokens)) > 10, "the model only repeats itself: nothing would be noticed"
        alone = host.tell(prompt(90), max_tokens=20)
        longer = host.tell([*prompt(50)[:30], 1, 2, 3], max_tokens=20)
        assert (alone.cached, longer.cached) == (88, 16 if family in WITH_STATES else 24)
        assert alone.tokens == said.tokens
        assert oracle.agrees([*prompt(50)[:30], 1, 2, 3], longer.tokens)
        assert host.tell(prompt(50), max_tokens=4, scope="another tenant").cached == 0
        assert host.engine.error() == ""


@pytest.mark.parametrize("host_bytes", [2 * MIB, 0])
def test_preemption_changes_no_token(family: str, oracle: Oracle, tmp_path: Path, host_bytes: int) -> None:
    gpu_bytes = (64 if family == "mistral" else 128) << 10  # which keeps no more than a window of any text
    kv = KvCacheConfig(tokens_per_block=8, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    context = (
        96 if family in WITH_STATES else 512
    )  # short texts: states for more of them than there are pages for
    config = write_family(tmp_path, family, max_position_embeddings=context)
    spec = dummy_spec(config, kv=kv, step_tokens=8)
    device = Device.host(f"families-{uuid.uuid4().hex[:12]}", 32 * MIB, granularity_bytes=16 << 10)
    with EngineHost(spec, device=device) as host:
        manager = host.engine._manager  # type: ignore[attr-defined]
        prompts = [prompt(20 + i, seed=i) for i in range(10)]
        asked = [host.ask(one, max_tokens=60) for one in prompts]
        for one, said in zip(prompts, asked, strict=True):
            assert oracle.agrees(one, said.wait().tokens), said.last
        assert host.engine._loop._scheduler.preemptions > 0  # type: ignore[attr-defined]
        stats = manager.stats()
        assert (stats["sequences"], stats["locked_pages"], stats["held_pages"]) == (0, 0, 0)
        assert host.engine.error() == ""


@pytest.mark.parametrize("family", WINDOWED, indirect=True)
def test_a_prompt_longer_than_a_windows_whole_pool_is_read_in_parts(
    family: str, oracle: Oracle, tmp_path: Path
) -> None:
    """Its pages come back while it is read; the chunks of a step are cut to what is free."""
    kv = KvCacheConfig(tokens_per_block=8, gpu_bytes=208 << 10, host_bytes=0)
    spec = dummy_spec(write_family(tmp_path, family), kv=kv, step_tokens=512)
    device = Device.host(f"families-{uuid.uuid4().hex[:12]}", 32 * MIB, granularity_bytes=16 << 10)
    with EngineHost(spec, device=device) as host:
        manager = host.engine._manager  # type: ignore[attr-defined]
        windows = [cycle["pool"] for cycle in manager.life_cycles if cycle["kind"] == "window"]
        assert all(manager.pools()[pool]["slots"] * 8 < 400 for pool in windows)
        said = host.tell(prompt(400), max_tokens=20)
        assert oracle.agrees(prompt(400), said.tokens), said.last


def test_the_logits_are_those_of_the_full_forward_within_millionths_of_the_largest(
    family: str, oracle: Oracle, tmp_path: Path
) -> None:
    from torpor.actors.engine.plan import Chunk

    with EngineHost(family_spec(tmp_path, family)) as host:
        host.engine.quiesce(10)
        book, runner, tokens = host.engine._book, host.engine._loop._runner, prompt(61)  # type: ignore[attr-defined]
        book.create(10**6, "", tokens)
        assert book.resume(10**6) and book.resize(10**6, len(tokens))
        expected = oracle.logits(tokens)
        apart = 3e-6 * float(expected.abs().max())
        for start, end in [(0, 13), (13, 14), (14, 40), (40, 60), (60, 61)]:
            rows = runner.forward([Chunk(10**6, start, tuple(tokens[start:end]), True)])
            book.commit(10**6, tokens[start:end])
            torch.testing.assert_close(rows[0], expected[end - 1], atol=apart, rtol=0)
        book.close(10**6)
        host.engine.resume()


@pytest.mark.parametrize("family", WITH_STATES, indirect=True)
def test_states_are_kept_where_they_will_be_asked_for_and_never_shared_between_tenants(
    family: str, oracle: Oracle, tmp_path: Path
) -> None:
    """K11: a snapshot matches exactly where it was taken; the next turn goes on from within the answer."""
    with EngineHost(family_spec(tmp_path, family)) as host:
        first = host.tell(prompt(20), max_tokens=21)  # 40 tokens are computed
        turn = prompt(20) + first.tokens + [5]
        second = host.tell(turn, max_tokens=8)
        assert (second.cached, oracle.agrees(turn, second.tokens)) == (32, True)
        other = host.tell(turn, max_tokens=8, scope="another tenant")
        assert (other.cached, other.tokens) == (0, second.tokens)
        branches = [[*prompt(20)[:cut], 7, 7] for cut in (16, 17, 15)]
        told = [host.tell(branch, max_tokens=8) for branch in branches]
        assert [one.cached for one in told] == [16, 16, 0]
        assert all(oracle.agrees(branch, one.tokens) for branch, one in zip(branches, told, strict=True))


def config_of(path: Path) -> object:
    return read_config(resolve(EngineConfig(model=str(path), load_format="dummy")))


def test_a_family_whose_plan_leaves_parts_whole_is_refused_over_ranks_and_the_others_are_not(
    family: str, tmp_path: Path
) -> None:
    config = config_of(write_family(tmp_path, family, num_attention_heads=6, num_key_value_heads=2))
    served = check_config(config, 1)
    if served.undivided:
        with pytest.raises(ModelRefused, match=rf"{served.architecture}.*leaves.*use tensor_parallel 1"):
            check_config(config, 2)
    else:
        assert check_config(config, 2) is served
        with pytest.raises(ModelRefused, match="num_attention_heads 6, which tensor_parallel 4"):
            check_config(config, 4)


def test_gguf_files_are_read_of_the_families_that_were_tried_only(family: str, tmp_path: Path) -> None:
    config = config_of(write_family(tmp_path, family))
    if family == "llama":
        assert check_config(config, 1, gguf=True).gguf
    else:
        with pytest.raises(
            ModelRefused, match=r"GGUF files of \w+ are not read, only those of LlamaForCausalLM"
        ):
            check_config(config, 1, gguf=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}, "Olmo2ForCausalLM is not served"),
        ({"model_type": "gemma2"}, "of model type 'gemma2' is not served"),
        ({"model_type": "qwen3", "architectures": ["LlamaForCausalLM"]}, "only 'llama'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            "'dynamic'",
        ),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "quantized by 'mxfp4'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "generates no text"),
    ],
)
def test_what_is_not_served_is_refused_by_name_before_anything_is_taken(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    host = EngineHost(dummy_spec(write_family(tmp_path, "llama", **changes)))
    free = host.device.memory_info()[0]
    with pytest.raises(ModelRefused, match=says):
        host.engine.load()
    assert (host.device.memory_info()[0], host.ledger.tags) == (free, [])


def test_every_family_of_the_table_has_a_small_model(tmp_path: Path) -> None:
    written = {json.loads(write_family(tmp_path, family).read_text())["model_type"] for family in FAMILIES}
    assert written == {one.model_type for one in SERVED}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("llama", {"num_key_value_heads": 6, "attention_bias": True}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 1}),
        ("gemma3", {"final_logit_softcapping": 3.0, "sliding_window": 9}),
        ("gpt_oss", {"num_key_value_heads": 1, "sliding_window": 24}),
        ("granite_hybrid", {"num_local_experts": 4, "intermediate_size": 32}),
        (
            "granite_hybrid",
            {"position_embedding_type": None, "residual_multiplier": 0.5, "logits_scaling": 4.0},
        ),
        ("granite_hybrid", {"layer_types": ["linear_attention"] * 3}),
        ("qwen3_next", {"num_experts": 0, "linear_num_value_heads": 2}),
        ("lfm2", {"conv_L_cache": 4, "conv_bias": True}),
    ],
)
def test_what_a_familys_configurations_may_change_is_token_exact_too(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    config = write_family(tmp_path, family, **changes)
    oracle = Oracle(config)
    kv = KvCacheConfig(tokens_per_block=8, gpu_bytes=8 * MIB, host_bytes=8 * MIB)
    with EngineHost(dummy_spec(config, kv=kv, step_tokens=16)) as host:
        asked = [host.ask(prompt(n), max_tokens=12) for n in (1, 9, 50)]
        for n, said in zip((1, 9, 50), asked, strict=True):
            assert oracle.agrees(prompt(n), said.wait().tokens), (n, said.last)
        again = host.tell(prompt(50), max_tokens=12)
        assert again.cached >= 40  # a window may have passed the last block within the chunk that computed it
        assert again.tokens == said.tokens
