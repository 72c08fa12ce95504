"""Weights of every family: loaded from a safetensors folder, written in place from one and from tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import write_tokenizer
from support.engine_host import WAIT_S, EngineHost, Oracle
from support.engine_rank import engine_rank
from support.families import FAMILIES, family_spec, write_family

from torpor.actors.engine.protocol import TensorSpec, WeightsRefused, WeightsSource
from torpor.actors.messages import OnDiscard

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [random.Random(f"weights {i}").randrange(256) for i in range(40)]


class Handed:
    """Tensors as a trainer hands them over: under the names that its own module gives them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.tensors = dict(module.named_parameters())

    def specs(self) -> Mapping[str, TensorSpec]:
        return {
            name: TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.tensors.items()
        }

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name].detach()


def update(host: EngineHost, source: WeightsSource) -> None:
    host.engine.check_weights(source)
    host.engine.quiesce(WAIT_S)
    try:
        host.engine.write_weights(host.engine.stage_weights(source, lambda: None))
    finally:
        host.engine.resume()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_loaded_and_written_in_place_whatever_they_come_in(family: str, tmp_path: Path) -> None:
    """C10, S1. Checkpoints of some families keep apart what the model has as one tensor."""
    config = write_family(tmp_path, family)
    one, two = Oracle(config, seed=1), Oracle(config, seed=2)
    for name, oracle in (("one", one), ("two", two)):
        oracle.model.save_pretrained(tmp_path / name)
        write_tokenizer(tmp_path / name)
    spec = family_spec(tmp_path, family)
    engine = replace(spec.model.engine, model=str(tmp_path / "one"), load_format="auto")
    with EngineHost(replace(spec, model=replace(spec.model, engine=engine))) as host:
        module = host.engine._model.module  # type: ignore[attr-defined]
        places = {name: tensor.data_ptr() for name, tensor in module.named_parameters()}

        def says(oracle: Oracle) -> bool:
            said = host.tell(PROMPT, max_tokens=12)
            assert said.cached == 0, "known to the weights before"
            return oracle.agrees(PROMPT, said.tokens)

        assert says(one)
        update(host, tmp_path / "two")
        assert says(two)
        update(host, Handed(one.model))
        assert says(one)
        assert {name: tensor.data_ptr() for name, tensor in module.named_parameters()} == places
        assert not two.agrees(PROMPT, host.tell(PROMPT, max_tokens=12).tokens)


@pytest.mark.parametrize("family", FAMILIES)
async def test_weights_that_slept_without_contents_are_read_again_from_their_folder(
    family: str, tmp_path: Path
) -> None:
    """C9: also where the folder keeps apart what the model has as one tensor. Prefixes are still good."""
    oracle = Oracle(write_family(tmp_path, family), seed=1)
    oracle.model.save_pretrained(tmp_path / "one")
    write_tokenizer(tmp_path / "one")
    spec = family_spec(tmp_path, family)
    engine = replace(spec.model.engine, model=str(tmp_path / "one"), load_format="auto")
    async with engine_rank(replace(spec, model=replace(spec.model, engine=engine))) as rank:
        for turn in range(2):
            await rank.ask(f"turn {turn}", PROMPT, max_tokens=12)
            await rank.ended(f"turn {turn}")
            assert oracle.agrees(PROMPT, rank.tokens(f"turn {turn}"))
            assert rank.last(f"turn {turn}").cached_tokens == (32 if turn else 0)
            await rank.sleep(restore={"weights": "none", "kv_cache": "pinned"})
            await rank.wake(on_discard=OnDiscard.RELOAD)


@pytest.mark.parametrize(
    ("family", "field", "other"),
    [
        ("gemma3", "sliding_window", 16),
        ("gpt_oss", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("granite_hybrid", "residual_multiplier", 0.5),
        ("qwen3_next", "num_experts_per_tok", 1),
    ],
)
def test_weights_of_a_model_that_computes_otherwise_are_refused(
    family: str, field: str, other: object, tmp_path: Path
) -> None:
    """They would fit, and mean something else."""
    config = write_family(tmp_path, family)
    Oracle(config).model.save_pretrained(tmp_path / "new")
    path = tmp_path / "new" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: other}))
    with EngineHost(family_spec(tmp_path, family)) as host, pytest.raises(WeightsRefused, match=field):
        host.engine.check_weights(tmp_path / "new")


def test_a_converted_checkpoint_that_lacks_a_tensor_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """C10: what its names mean is known only when it is read, in the stage."""
    from safetensors.torch import load_file, save_file

    config = write_family(tmp_path, "qwen3_next")
    oracle = Oracle(config)
    oracle.model.save_pretrained(tmp_path / "new")
    file = tmp_path / "new" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, file, {"format": "pt"})
    with EngineHost(family_spec(tmp_path, "qwen3_next")) as host:
        with pytest.raises(WeightsRefused, match=f"{tmp_path}/new cannot be read"):
            update(host, tmp_path / "new")
        assert oracle.agrees(PROMPT, host.tell(PROMPT, max_tokens=12).tokens)
