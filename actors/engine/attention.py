"""Paged attention for transformers models, in plain torch: runs wherever torch does.

It is registered with transformers under ATTENTION and finds its batch in forward's keyword arguments; transformers
makes no mask for an attention that it does not know.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from torpor.actors.engine.batch import Decode, PagedBatch, Prefill

ATTENTION = "torpor_paged"


def register() -> None:
    """Make ATTENTION known to transformers. Repeatable."""
    AttentionInterface.register(ATTENTION, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged_batch: PagedBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query: (1, heads, T, head_dim); key, value: (1, kv_heads, T, head_dim). Returns (1, T, heads, head_dim)."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = paged_batch.keys[layer], paged_batch.values[layer]
    keys[paged_batch.new_slots, paged_batch.new_offsets] = key[0].transpose(0, 1).to(keys.dtype)
    values[paged_batch.new_slots, paged_batch.new_offsets] = value[0].transpose(0, 1).to(values.dtype)
    output = torch.empty_like(query[0].transpose(0, 1))  # (T, heads, head_dim)
    for prefill in paged_batch.prefills:
        output[prefill.rows] = attend_prefill(query[0][:, prefill.rows], keys, values, prefill, scaling)
    for decode in paged_batch.decodes:
        output[decode.rows] = attend_decode(query[0][:, decode.rows], keys, values, decode, scaling)
    return output[None], None


def attend_prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prefill: Prefill, scaling: float
) -> torch.Tensor:
    """query: (heads, n, head_dim). Returns (n, heads, head_dim)."""
    key = keys[prefill.blocks].flatten(0, 1)[: prefill.context_tokens].transpose(0, 1)
    value = values[prefill.blocks].flatten(0, 1)[: prefill.context_tokens].transpose(0, 1)
    attended = F.scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        scale=scaling,
        enable_gqa=query.shape[0] != key.shape[0],
    )
    return attended[0].transpose(0, 1)


def attend_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, decode: Decode, scaling: float
) -> torch.Tensor:
    """query: (heads, B, head_dim). Returns (B, heads, head_dim)."""
    key = keys[decode.slots, decode.offsets].transpose(1, 2)  # (B, kv_heads, longest, head_dim)
    value = values[decode.slots, decode.offsets].transpose(1, 2)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[:, :, None],
        key,
        value,
        attn_mask=decode.mask,
        scale=scaling,
        enable_gqa=query.shape[0] != key.shape[1],
    )
    return attended[:, :, 0]
