"""Paged attention for transformers models, by the implementation that suits the device.

It is registered with transformers under ATTENTION and finds its batch in forward's keyword arguments; transformers
makes no mask for an attention that it does not know.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from transformers import AttentionInterface

from torpor.actors.engine.batch import PagedBatch
from torpor.actors.engine.errors import ModelRefused
from torpor.actors.engine.gathered import GatheredReader
from torpor.actors.engine.reading import Reader, Scoring

ATTENTION = "torpor_paged"
IMPLEMENTATIONS = ("auto", "torch", "triton")  # of `engine.attention`


def register() -> None:
    """Make ATTENTION known to transformers. Repeatable."""
    AttentionInterface.register(ATTENTION, paged_attention)


def check_implementation(wanted: str, device_kind: str) -> None:
    """wanted: as `engine.attention` has it; device_kind: host or cuda. Raises ModelRefused."""
    if wanted not in IMPLEMENTATIONS:
        raise ModelRefused(f"engine.attention {wanted!r} is unknown; known: {', '.join(IMPLEMENTATIONS)}")
    if wanted == "triton" and device_kind != "cuda":
        raise ModelRefused("engine.attention triton needs a CUDA device; here use auto or torch")
    if wanted == "triton" and not _has_triton():
        raise ModelRefused(
            "engine.attention triton needs the package triton, which torch for CUDA brings along"
        )


def make_reader(wanted: str, device_kind: str) -> Reader:
    """What `check_implementation` has allowed. auto: the kernel on CUDA devices where triton is, else plain torch."""
    if wanted == "torch" or device_kind != "cuda" or not _has_triton():
        return GatheredReader()
    # Here, not above: a machine without a GPU has no triton.
    from torpor.actors.engine.tiled import TiledReader

    return TiledReader()


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


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
    output = places.reads.attend(_rows(query), keys, values, Scoring(scaling, softcap, s_aux))
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]), None


def _rows(packed: torch.Tensor) -> torch.Tensor:
    """(B, heads, n, head_dim) as (B n, heads, head_dim)."""
    return packed.transpose(1, 2).flatten(0, 1)
