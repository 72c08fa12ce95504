"""Paged attention for transformers models, in plain torch: runs wherever torch does.

It is registered with transformers under ATTENTION and finds its batch in forward's keyword arguments; transformers
makes no mask for an attention that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from torpor.actors.engine.batch import Decode, PagedBatch, Prefill

ATTENTION = "torpor_paged"


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer weighs its context. softcap: bound of the scores. sinks: (heads,) scores of a token without value."""

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query: (1, heads, T, head_dim); key, value: (1, kv_heads, T, head_dim). Returns (1, T, heads, head_dim).

    Or (T, heads, 1, head_dim), of T sequences, and (T, 1, heads, head_dim).
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    places = paged_batch.places[layer]
    if sliding_window != places.window:
        raise AssertionError(
            f"layer {layer} asks for a window of {sliding_window}, pages keep {places.window}"
        )
    keys, values = paged_batch.keys[layer], paged_batch.values[layer]
    keys[places.new_slots, places.new_offsets] = _rows(key).to(keys.dtype)
    values[places.new_slots, places.new_offsets] = _rows(value).to(values.dtype)
    scoring, rows = Scoring(scaling, softcap, s_aux), _rows(query)
    output = torch.empty_like(rows)
    for prefill in places.prefills:
        output[prefill.rows] = attend_prefill(rows[prefill.rows], keys, values, prefill, scoring)
    for decode in places.decodes:
        output[decode.rows] = attend_decode(rows[decode.rows], keys, values, decode, scoring)
    return output.view(query.shape[0], query.shape[2], *rows.shape[1:]), None


def _rows(packed: torch.Tensor) -> torch.Tensor:
    """(B, heads, n, head_dim) as (B n, heads, head_dim)."""
    return packed.transpose(1, 2).flatten(0, 1)


def attend_prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prefill: Prefill, scoring: Scoring
) -> torch.Tensor:
    """query: (n, heads, head_dim). Returns its like."""
    key = keys[prefill.blocks].flatten(0, 1)[: prefill.context_tokens].transpose(0, 1)
    value = values[prefill.blocks].flatten(0, 1)[: prefill.context_tokens].transpose(0, 1)
    return attend(query.transpose(0, 1)[None], key[None], value[None], prefill.mask, scoring)[0].transpose(
        0, 1
    )


def attend_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, decode: Decode, scoring: Scoring
) -> torch.Tensor:
    """query: (B, heads, head_dim). Returns its like."""
    key = keys[decode.slots, decode.offsets].transpose(1, 2)  # (B, kv_heads, longest, head_dim)
    value = values[decode.slots, decode.offsets].transpose(1, 2)
    return attend(query[:, :, None], key, value, decode.mask, scoring)[:, :, 0]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """query: (B, heads, n, head_dim); key, value: (B, kv_heads, m, head_dim). Returns (B, heads, n, head_dim).

    mask: True where visible, to be broadcast to (B, heads, n, m); None: n is m, and each token sees those up to it.
    """
    groups = query.shape[1] // key.shape[1]
    if scoring.softcap is None and scoring.sinks is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scoring.scaling,
            enable_gqa=groups > 1,
        )
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if scoring.sinks is None:
        return scores.softmax(dim=-1) @ value
    sinks = scoring.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1] @ value
