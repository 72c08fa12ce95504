"""What each layer of a model keeps in the KV cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from torpor.actors.engine.states import CONVOLUTION, RECURRENT
from torpor.native import Buffer, KvManager, LayerSpec

SLIDING, STATES = "sliding_attention", ("linear_attention", "conv")  # as transformers names types of layers
UNBOUNDED_BLOCKS = 1 << 40


def layer_specs(config: Any, dtype: torch.dtype, tensor_parallel: int) -> list[LayerSpec]:
    """One a layer, of one rank's share."""
    heads = int(config.num_key_value_heads) // tensor_parallel
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    name = dtype_name(dtype)
    specs = []
    for layer in range(int(config.num_hidden_layers)):
        if has_state(config, layer):
            specs.append(LayerSpec("state", STATE_BUFFERS[config.model_type](config, name)))
            continue
        buffers = [Buffer("k", [heads, dim], name), Buffer("v", [heads, dim], name)]
        window = window_of(config, layer)
        if window is None:
            specs.append(LayerSpec("full", buffers))
        else:
            specs.append(LayerSpec("window", buffers, window=window))
    return specs


def has_state(config: Any, layer: int) -> bool:
    types = getattr(config, "layer_types", None)
    return types is not None and types[layer] in STATES


def _mamba_2(config: Any, dtype: str) -> list[Buffer]:
    channels = config.mamba_expand * config.hidden_size + 2 * config.mamba_n_groups * config.mamba_d_state
    state = [config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state]
    return [
        Buffer(CONVOLUTION, [channels, config.mamba_d_conv], dtype),
        Buffer(RECURRENT, state, "float32"),  # whatever the model's own dtype, as transformers computes it
    ]


def _gated_delta(config: Any, dtype: str) -> list[Buffer]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    state = [config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim]
    return [
        Buffer(CONVOLUTION, [2 * keys + values, config.linear_conv_kernel_dim], dtype),
        Buffer(RECURRENT, state, "float32"),
    ]


def _short_convolution(config: Any, dtype: str) -> list[Buffer]:
    return [Buffer(CONVOLUTION, [config.hidden_size, config.conv_L_cache], dtype)]


# By model type: what a layer keeps of a sequence instead of K and V of its tokens.
STATE_BUFFERS: Mapping[str, Callable[[Any, str], list[Buffer]]] = MappingProxyType(
    {"granitemoehybrid": _mamba_2, "qwen3_next": _gated_delta, "lfm2": _short_convolution}
)


def window_of(config: Any, layer: int) -> int | None:
    """Tokens that a layer sees, its own included; None: all."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] != SLIDING:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_kind(manager: KvManager, kind: str) -> bool:
    """kind: full, window or state."""
    return any(cycle["kind"] == kind for cycle in manager.life_cycles)


def longest_text_tokens(manager: KvManager) -> int | None:
    """Tokens of one sequence that has the whole cache; None: any number."""
    bounds = [
        _longest_in(
            pool["slots"], [cycle for cycle in manager.life_cycles if cycle["pool"] == index], manager
        )
        for index, pool in enumerate(manager.pools())
    ]
    return min((bound for bound in bounds if bound is not None), default=None)


def _longest_in(slots: int, cycles: list[dict[str, Any]], manager: KvManager) -> int | None:
    """Of one pool."""
    size = manager.tokens_per_block

    def taken(blocks: int) -> int:
        """Of a window: its own blocks, and one more, as its ends lie inside blocks."""
        most = {"full": blocks, "state": 1}
        return sum(
            most[cycle["kind"]] if cycle["kind"] in most else min(blocks, -(-cycle["window"] // size) + 1)
            for cycle in cycles
        )

    if taken(UNBOUNDED_BLOCKS) <= slots:
        return None
    return (bisect_right(range(slots + 1), slots, key=taken) - 1) * size
