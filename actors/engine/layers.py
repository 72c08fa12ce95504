"""What each layer of a model keeps in the KV cache."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch

from torpor.native import Buffer, KvManager, LayerSpec

SLIDING = "sliding_attention"  # as transformers names types of layers
UNBOUNDED_BLOCKS = 1 << 40


def layer_specs(config: Any, dtype: torch.dtype, tensor_parallel: int) -> list[LayerSpec]:
    """One a layer, of one rank's share."""
    heads = int(config.num_key_value_heads) // tensor_parallel
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    name = dtype_name(dtype)
    specs = []
    for layer in range(int(config.num_hidden_layers)):
        buffers = [Buffer("k", [heads, dim], name), Buffer("v", [heads, dim], name)]
        window = window_of(config, layer)
        if window is None:
            specs.append(LayerSpec("full", buffers))
        else:
            specs.append(LayerSpec("window", buffers, window=window))
    return specs


def window_of(config: Any, layer: int) -> int | None:
    """Tokens that a layer sees, its own included; None: all."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] != SLIDING:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_windows(manager: KvManager) -> bool:
    return any(cycle["kind"] == "window" for cycle in manager.life_cycles)


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
