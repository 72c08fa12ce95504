"""The default engine over a dummy Llama, in the benchmark's own process, and when each answer came."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import write_tokenizer
from support.engine_host import EngineHost
from transformers import AutoConfig, AutoModelForCausalLM

from torpor.actors.config import GIB, MIB, DeviceConfig, EngineConfig, KvCacheConfig, ModelConfig, RankSpec
from torpor.actors.messages import TokenEvent
from torpor.native import Device

# 8.03 B parameters
EIGHT_BILLION: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# For rehearsals on host devices.
SMALL = EIGHT_BILLION | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def make_model(shape: dict[str, Any], where: str) -> Any:
    """Random weights in bfloat16, made on the device `where`; there always the same ones."""
    torch.manual_seed(1)
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.bfloat16)
    return model.eval()


def write_checkpoint(folder: Path, shape: dict[str, Any], where: str) -> Path:
    """Random weights in bfloat16, made on the device `where`; those of an earlier call are taken as they are."""
    if not (folder / "tokenizer.json").exists():
        model = make_model(shape, where)
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(shape | {"dtype": "bfloat16"}))
        write_tokenizer(folder)
        del model
        if where == "cuda":
            torch.cuda.empty_cache()
    return folder


def spec(folder: Path, on_host: bool, **engine: Any) -> RankSpec:
    gpu_bytes, host_bytes = (64 * MIB, 64 * MIB) if on_host else (40 * GIB, 8 * GIB)  # nothing is evicted
    return RankSpec(
        model=ModelConfig(
            name="bench",
            engine=EngineConfig(model=str(folder), dtype="bfloat16", **engine),
            kv_cache=KvCacheConfig(tokens_per_block=32, gpu_bytes=gpu_bytes, host_bytes=host_bytes),
        ),
        rank=0,
        incarnation="bench",
        device=DeviceConfig(kind="host" if on_host else "cuda"),
        device_index=0,
        host_pool_bytes=0 if on_host else 32 * GIB,
    )


class Served(EngineHost):
    """Also knows when the first token of each answer came."""

    def __init__(self, folder: Path, on_host: bool, **engine: Any) -> None:
        device = None if on_host else Device.cuda(0)
        super().__init__(spec(folder, on_host, **engine), capacity_bytes=512 * MIB, device=device)
        self.first_s: dict[int, float] = {}
        self.stages: list[dict[str, Any]] = []  # what each stage has reported
        self.on_first: Callable[[], None] | None = None  # called when the next request's first token has come

    @property
    def graphs(self) -> str:
        off = str(self.engine.graphs_off)  # type: ignore[attr-defined]
        return f"off: {off}" if off else "on"

    @property
    def attention(self) -> str:
        return str(self.engine.attention)  # type: ignore[attr-defined]

    def _sink(self, events: Sequence[TokenEvent]) -> None:
        now = time.perf_counter()
        for event in events:
            if not event.token_ids or id(self.said[event.request]) in self.first_s:
                continue
            self.first_s[id(self.said[event.request])] = now
            if self.on_first is not None:
                self.on_first()
        super()._sink(events)

    def _transact(self, kind: str, tags: Sequence[str], restore: dict[str, str] | None) -> dict[str, Any]:
        plan = self.ledger.preflight(kind, f"{kind}-{len(self.stages)}", list(tags), restore)
        assert not plan.refusals, plan.refusals
        began = time.perf_counter()
        report = self.ledger.stage(plan, 120.0)
        self.stages.append({**report, "seconds": time.perf_counter() - began})
        report = self.ledger.commit()
        self.ledger.publish()
        return report

    def first_token(self, prompt: list[int], tokens: int) -> tuple[float, list[int], int]:
        """Seconds to the first token of an answer of so many; the answer; how many tokens of the prompt were known."""
        began = time.perf_counter()
        said = self.tell(prompt, max_tokens=tokens, ignore_eos=True)
        return self.first_s[id(said)] - began, said.tokens, said.cached


def text(tokens: int, vocabulary: int, seed: int) -> list[int]:
    """Random tokens."""
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(tokens)]
