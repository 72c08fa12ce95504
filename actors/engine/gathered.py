"""Attention over pages in plain torch: they are gathered, then attended to. Runs wherever torch does."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from torpor.actors.engine.reading import Scoring, Stretch

MAX_PADDING = (
    2  # sequences decode together while the longest has at most this many times the tokens of the shortest
)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Several new tokens of one sequence, attending to what its window shows of everything before them.

    rows: where they lie in the packed row. blocks: (n,) slots holding context_tokens tokens, the new ones included.
    mask: (new, context) True where visible; None when the new tokens are the whole context, and all is visible.
    """

    rows: slice
    blocks: torch.Tensor
    context_tokens: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Decode:
    """One new token each of several sequences of similar length.

    rows: (B,) in the packed row. slots, offsets: (B, longest) place of each context token; padding repeats the
    sequence's first visible token, so that no undefined memory is read. mask: (B, 1, 1, longest) True where visible.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Single:
    """One new token: what it sees begins at position `first`; its place in the packed row; its sequence's pages."""

    context_tokens: int
    first: int
    row: int
    table: NDArray[np.int32]


class GatheredReads:
    """See reading.Reads."""

    def __init__(self, prefills: SequenceOf[Prefill], decodes: SequenceOf[Decode]) -> None:
        self._prefills = tuple(prefills)
        self._decodes = tuple(decodes)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        for prefill in self._prefills:
            output[prefill.rows] = attend_prefill(query[prefill.rows], keys, values, prefill, scoring)
        for decode in self._decodes:
            output[decode.rows] = attend_decode(query[decode.rows], keys, values, decode, scoring)
        return output


class GatheredReader:
    """See reading.Reader."""

    name = "torch"

    def __call__(
        self, stretches: SequenceOf[Stretch], window: int | None, tokens_per_block: int, device: torch.device
    ) -> GatheredReads:
        prefills: list[Prefill] = []
        single: list[Single] = []
        for one in stretches:
            if one.tokens == 1:
                seen = one.start + 1 if window is None else min(one.start + 1, window)
                single.append(Single(seen, one.start + 1 - seen, one.row, one.table))
            else:
                prefills.append(_prefill(one, window, tokens_per_block, device))
        groups = similar_lengths(single)
        return GatheredReads(prefills, [_decode(group, tokens_per_block, device) for group in groups])


def _prefill(one: Stretch, window: int | None, tokens_per_block: int, device: torch.device) -> Prefill:
    context = one.start + one.tokens
    first = 0 if window is None else max(one.start + 1 - window, 0) // tokens_per_block
    blocks = one.table[first : -(-context // tokens_per_block)].astype(np.int64)
    before = one.start - first * tokens_per_block  # tokens of the context that are not new
    mask = None
    if before or (window is not None and window < one.tokens):
        mask = torch.ones(one.tokens, before + one.tokens, dtype=torch.bool, device=device).tril(before)
        if window is not None:
            mask = mask.triu(before + 1 - window)
    rows = slice(one.row, one.row + one.tokens)
    return Prefill(rows, _tensor(blocks, device), before + one.tokens, mask)


def _decode(group: SequenceOf[Single], tokens_per_block: int, device: torch.device) -> Decode:
    lengths = np.array([one.context_tokens for one in group])
    firsts = np.array([one.first for one in group])
    places = np.arange(lengths.max())[None].repeat(len(group), axis=0)
    visible = places < lengths[:, None]
    places = firsts[:, None] + np.where(visible, places, 0)
    slots = np.stack([one.table[row // tokens_per_block] for row, one in zip(places, group, strict=True)])
    return Decode(
        rows=_tensor([one.row for one in group], device),
        slots=_tensor(slots.astype(np.int64), device),
        offsets=_tensor(places % tokens_per_block, device),
        mask=torch.from_numpy(visible[:, None, None]).to(device),
    )


def similar_lengths(single: SequenceOf[Single]) -> list[list[Single]]:
    """Groups whose longest context has at most MAX_PADDING times the tokens of the shortest."""
    groups: list[list[Single]] = []
    for item in sorted(single, key=lambda entry: entry.context_tokens):
        if groups and item.context_tokens <= MAX_PADDING * groups[-1][0].context_tokens:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _tensor(numbers: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(np.asarray(numbers, dtype=np.int64), device=device)


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
