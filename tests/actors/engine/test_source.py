"""What is refused before any memory is taken, and how it is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_tokenizer
from support.engine_host import EngineHost, Oracle, dummy_spec, write_config
from transformers import LlamaConfig, LlamaForCausalLM

from torpor.actors.config import EngineConfig
from torpor.actors.engine import ModelRefused, make_engine


def refused(config: EngineConfig, tiny: Path, tensor_parallel: int = 1) -> str:
    spec = dummy_spec(tiny)
    spec = replace(spec, model=replace(spec.model, engine=config, tensor_parallel=tensor_parallel))
    host = EngineHost(spec)
    free = host.device.memory_info()[0]
    with pytest.raises(ModelRefused) as caught:
        host.engine.load()
    assert host.device.memory_info()[0] == free
    assert host.ledger.tags == []
    return str(caught.value)


def test_a_model_that_is_not_there_is_named(tiny: Path, tmp_path: Path) -> None:
    assert f"no model at {tmp_path}/none.gguf" in refused(EngineConfig(model=f"{tmp_path}/none.gguf"), tiny)
    assert "engine.model is empty" in refused(EngineConfig(), tiny)


def test_a_damaged_gguf_file_is_named(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<html>not found</html>")
    assert "is not a GGUF file" in refused(EngineConfig(model=str(path)), tiny)
    path.write_bytes(b"GGUF" + bytes(100))
    said = refused(EngineConfig(model=str(path)), tiny)
    assert "cannot be read" in said and str(path) in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not readable JSON"),
        ("GGUF", "load_format dummy reads a config.json"),
        ("[]", "names no model_type"),
        ('{"model_type": "no-such"}', "cannot be read"),
    ],
)
def test_a_damaged_configuration_is_named(tiny: Path, tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert says in refused(EngineConfig(model=str(path), load_format="dummy"), tiny)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"load_format": "pickle"}, "known: auto, gguf, safetensors, dummy"),
        ({"load_format": "safetensors"}, "name its folder"),
        ({"dtype": "int4"}, "known: auto, float32"),
        ({"attention": "flash"}, "known: auto, torch, triton"),
        ({"max_context_tokens": 4096}, "takes 2 to 512"),
    ],
)
def test_an_unknown_setting_is_refused_with_those_that_are_known(
    tiny: Path, changes: dict[str, object], says: str
) -> None:
    config = replace(EngineConfig(model=str(tiny), load_format="dummy"), **changes)  # type: ignore[arg-type]
    assert says in refused(config, tiny)


def test_another_architecture_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    said = refused(EngineConfig(model=str(path), load_format="dummy"), tiny)
    assert "GPT2LMHeadModel is not served" in said and "LlamaForCausalLM" in said


def test_rotary_tables_that_grow_with_the_text_are_refused(tiny: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    path = write_config(tmp_path, rope_parameters=rope)
    assert "'dynamic' is not served" in refused(EngineConfig(model=str(path), load_format="dummy"), tiny)


def test_an_unknown_engine_or_a_senseless_bound_is_refused_at_once(tiny: Path) -> None:
    spec = dummy_spec(tiny)
    host = EngineHost(spec)
    for engine, says in [({"kind": "magic"}, "known: transformers"), ({"max_running": 0}, "at least 1")]:
        wrong = replace(spec, model=replace(spec.model, engine=replace(spec.model.engine, **engine)))
        with pytest.raises(ModelRefused, match=says):
            make_engine(wrong, host.ledger, host.device)


def test_a_safetensors_folder_is_served(tiny: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**json.loads(config.read_text())))
    model.save_pretrained(tmp_path)
    assert "holds no tokenizer" in refused(EngineConfig(model=str(tmp_path)), tiny)
    write_tokenizer(tmp_path)
    (whole := tmp_path / "model.safetensors").rename(tmp_path / "kept")
    tensors = load_file(tmp_path / "kept")
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}, whole, {"format": "pt"})
    assert "lacks 1 tensors, the first model.layers.1.mlp.up_proj" in refused(
        EngineConfig(model=str(tmp_path)), tiny
    )
    (tmp_path / "kept").rename(whole)
    oracle = Oracle(config)
    oracle.model.load_state_dict(model.state_dict())
    spec = dummy_spec(tmp_path)
    engine = replace(spec.model.engine, load_format="auto")
    with EngineHost(replace(spec, model=replace(spec.model, engine=engine))) as host:
        assert host.tell("f", max_tokens=1).last.prompt_tokens == 1
        assert host.tell([5, 6, 7], max_tokens=8).tokens == oracle.greedy([5, 6, 7], 8)
