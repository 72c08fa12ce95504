"""The paged attention kernel: a tile of one sequence's new tokens against its context, by an online softmax.

One kernel for prompts over a cached prefix and for decoding. A program has one tile and one head of K and V, whose
whole group of query heads it computes at once. Long contexts of few tokens are split over several programs, whose parts
a second, small kernel joins.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["part_rows", "table_stride"])
def attend_tiles(
    query,
    keys,
    values,
    output,
    parts,
    maxima,
    sums,
    sinks,
    tiles,
    tables,
    scaling,
    softcap,
    heads,
    part_rows,
    query_row_stride,
    query_head_stride,
    key_slot_stride,
    key_token_stride,
    key_head_stride,
    value_slot_stride,
    value_token_stride,
    value_head_stride,
    table_stride,
    WINDOW: tl.constexpr,  # 0: none
    GROUP: tl.constexpr,  # query heads of one head of K and V
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile: GROUP for each token, and padding
    COLUMNS: tl.constexpr,  # context tokens at once
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """tiles: (n, 4) int32: first row, tokens, position of the first, row of tables. tables: (sequences, blocks) int32.

    query, output: (T, heads, DIM), output contiguous. parts: (SPLITS, T, heads, DIM), maxima and sums:
    (SPLITS, T, heads), float32, only where SPLITS is above 1. Grid: (n, heads of K and V, SPLITS).
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first_row = tl.load(tiles + tile * 4)
    tokens = tl.load(tiles + tile * 4 + 1)
    start = tl.load(tiles + tile * 4 + 2)
    table = tables + tl.load(tiles + tile * 4 + 3) * table_stride
    line = tl.arange(0, ROWS)
    token = line // GROUP
    head = kv_head * GROUP + line % GROUP
    row = (first_row + token).to(tl.int64)
    position = start + token
    dims = tl.arange(0, DIM_PADDED)
    stored = (token < tokens)[:, None] & (dims < DIM)[None, :]
    places = row[:, None] * query_row_stride + head[:, None] * query_head_stride + dims[None, :]
    q = tl.load(query + places, mask=stored, other=0.0)

    end = start + tokens
    first = 0
    if WINDOW > 0:
        first = tl.maximum(start + 1 - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(end - first, COLUMNS), SPLITS) * COLUMNS
    first = first + split * share
    end = tl.minimum(end, first + share)

    most = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mixed = tl.zeros([ROWS, DIM_PADDED], dtype=tl.float32)
    for at in range(first, end, COLUMNS):
        seen = at + tl.arange(0, COLUMNS)
        inside = seen < end
        slot = tl.load(table + seen // TOKENS_PER_BLOCK, mask=inside, other=0).to(tl.int64)
        offset = seen % TOKENS_PER_BLOCK
        key_at = slot * key_slot_stride + offset * key_token_stride + kv_head * key_head_stride
        k = tl.load(
            keys + key_at[None, :] + dims[:, None], mask=inside[None, :] & (dims < DIM)[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee").to(tl.float32) * scaling
        if HAS_SOFTCAP:
            # tanh by the exponential of a number that is never positive
            bent = scores / softcap
            shrunk = tl.exp(-2.0 * tl.abs(bent))
            scores = tl.where(bent < 0, -1.0, 1.0) * (1.0 - shrunk) / (1.0 + shrunk) * softcap
        visible = inside[None, :] & (seen[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (seen[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a line may see nothing of these columns
        weights = tl.exp(scores - base[:, None])
        kept = tl.exp(most - base)
        value_at = slot * value_slot_stride + offset * value_token_stride + kv_head * value_head_stride
        v = tl.load(
            values + value_at[:, None] + dims[None, :],
            mask=inside[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * kept + tl.sum(weights, 1)
        most = higher

    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=token < tokens, other=0.0).to(tl.float32)
            higher = tl.maximum(most, sink)
            mixed = mixed * tl.exp(most - higher)[:, None]
            total = total * tl.exp(most - higher) + tl.exp(sink - higher)
        result = mixed / tl.where(total > 0, total, 1.0)[:, None]
        out_at = (row * heads + head)[:, None] * DIM + dims[None, :]
        tl.store(output + out_at, result.to(output.dtype.element_ty), mask=stored)
    else:
        line_at = (split * part_rows + row) * heads + head
        tl.store(parts + line_at[:, None] * DIM + dims[None, :], mixed, mask=stored)
        tl.store(maxima + line_at, most, mask=token < tokens)
        tl.store(sums + line_at, total, mask=token < tokens)


@triton.jit(do_not_specialize=["part_rows"])
def join_parts(
    output,
    parts,
    maxima,
    sums,
    sinks,
    tiles,
    heads,
    part_rows,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Shapes as above, of tiles that have one token each. Grid: (tiles, heads)."""
    row = tl.load(tiles + tl.program_id(0) * 4).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM_PADDED)
    line_at = (splits * part_rows + row) * heads + head
    most = tl.load(maxima + line_at)
    highest = tl.max(most, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    kept = tl.exp(most - highest)
    total = tl.sum(tl.load(sums + line_at) * kept, 0)
    if HAS_SINKS:
        total += tl.exp(sink - highest)
    held = tl.load(parts + line_at[:, None] * DIM + dims[None, :], mask=(dims < DIM)[None, :], other=0.0)
    result = tl.sum(held * kept[:, None], 0) / total
    tl.store(output + (row * heads + head) * DIM + dims, result.to(output.dtype.element_ty), mask=dims < DIM)
