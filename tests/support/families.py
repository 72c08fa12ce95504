"""A small random model of each family that the engine serves, and what each of them is to show."""

from __future__ import annotations

import json
from pathlib import Path

from support.engine_host import dummy_spec

from torpor.actors.config import MIB, KvCacheConfig, RankSpec

# Weights spread widely enough that greedy texts wander.
_COMMON: dict[str, object] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LATE_FULL = ["sliding_attention", "sliding_attention", "full_attention"]

CONFIGS: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2},
    "mistral": {"model_type": "mistral", "sliding_window": 20, "tie_word_embeddings": False},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 8,
        "layer_types": _LATE_FULL,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": False,  # tied, it only repeats its last token
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "granite_hybrid": {
        "model_type": "granitemoehybrid",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "position_embedding_type": "rope",
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "tie_word_embeddings": False,
    },
    "lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 16,
    },
}
FAMILIES = tuple(CONFIGS)
WITH_STATES = ("granite_hybrid", "qwen3_next", "lfm2")
MOST_PARAMETERS = 1_000_000


def write_family(folder: Path, family: str, **changes: object) -> Path:
    """The configuration of its small model; for load_format dummy."""
    path = folder / f"{family}.json"
    path.write_text(json.dumps(_COMMON | CONFIGS[family] | changes))
    return path


def family_spec(folder: Path, family: str, **engine: object) -> RankSpec:
    """8 MiB on the device and on the host: every kind of layer has a pool of its own, in whole granules."""
    kv = KvCacheConfig(tokens_per_block=8, gpu_bytes=8 * MIB, host_bytes=8 * MIB)
    return dummy_spec(write_family(folder, family), kv=kv, **({"step_tokens": 16} | engine))
