"""One forward's tokens, packed into a single row, and where their K and V lie."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from torpor.actors.engine.plan import Chunk
from torpor.native import KvManager

MAX_PADDING = (
    2  # sequences decode together while the longest has at most this many times the tokens of the shortest
)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Several new tokens of one sequence, attending to everything before them.

    rows: where they lie in the packed row. blocks: (n,) slots holding context_tokens tokens, the new ones included.
    mask: (new, context) True where visible; None when the new tokens are the whole context.
    """

    rows: slice
    blocks: torch.Tensor
    context_tokens: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Decode:
    """One new token each of several sequences of similar length.

    rows: (B,) in the packed row. slots, offsets: (B, longest) place of each context token; padding repeats the
    sequence's first token, so that no undefined memory is read. mask: (B, 1, 1, longest) True where visible.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """keys, values: one (slots, tokens_per_block, kv_heads, head_dim) view a layer.

    input_ids, position_ids: (1, T). new_slots, new_offsets: (T,) where the new tokens' K and V go.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    new_slots: torch.Tensor
    new_offsets: torch.Tensor
    prefills: tuple[Prefill, ...]
    decodes: tuple[Decode, ...]
    logit_rows: torch.Tensor  # (n,) rows whose logits are wanted, in the order of the chunks


class Pages:
    """The manager's pools as tensors, at addresses that never change."""

    def __init__(self, manager: KvManager, layers: int, device: torch.device) -> None:
        self.keys = tuple(from_dlpack(manager.page_view(layer, "k")) for layer in range(layers))
        self.values = tuple(from_dlpack(manager.page_view(layer, "v")) for layer in range(layers))
        self.tokens_per_block = manager.tokens_per_block
        self.device = device

    def batch(self, chunks: SequenceOf[Chunk], tables: SequenceOf[NDArray[np.int32]]) -> PagedBatch:
        """tables: the page table of each chunk's sequence, covering all its tokens up to the chunk's end."""
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions = np.concatenate([np.arange(c.start, c.start + len(c.tokens)) for c in chunks])
        slots = np.concatenate(
            [self._slots(t, c.start, len(c.tokens)) for c, t in zip(chunks, tables, strict=True)]
        )
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks])
        prefills: list[Prefill] = []
        single: list[tuple[int, int, NDArray[np.int32]]] = []  # context tokens, row, table
        for chunk, table, end in zip(chunks, tables, ends, strict=True):
            if len(chunk.tokens) == 1:
                single.append((chunk.start + 1, int(end) - 1, table))
            else:
                prefills.append(self._prefill(chunk, table, int(end)))
        wanted = [int(end) - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.wants_logits]
        return PagedBatch(
            keys=self.keys,
            values=self.values,
            input_ids=self._tensor([tokens]),
            position_ids=self._tensor(positions[None]),
            new_slots=self._tensor(slots),
            new_offsets=self._tensor(positions % self.tokens_per_block),
            prefills=tuple(prefills),
            decodes=tuple(self._decode(group) for group in similar_lengths(single)),
            logit_rows=self._tensor(wanted),
        )

    def _slots(self, table: NDArray[np.int32], start: int, count: int) -> NDArray[np.int64]:
        slots = table[np.arange(start, start + count) // self.tokens_per_block].astype(np.int64)
        if slots.min() < 0:
            raise AssertionError(f"tokens {start} to {start + count} lie beyond the pages of their sequence")
        return slots

    def _prefill(self, chunk: Chunk, table: NDArray[np.int32], end: int) -> Prefill:
        new, context = len(chunk.tokens), chunk.start + len(chunk.tokens)
        blocks = table[: -(-context // self.tokens_per_block)].astype(np.int64)
        mask = None
        if chunk.start:
            mask = torch.ones(new, context, dtype=torch.bool, device=self.device).tril(chunk.start)
        return Prefill(slice(end - new, end), self._tensor(blocks), context, mask)

    def _decode(self, group: SequenceOf[tuple[int, int, NDArray[np.int32]]]) -> Decode:
        lengths = np.array([context for context, _, _ in group])
        places = np.arange(lengths.max())[None].repeat(len(group), axis=0)
        visible = places < lengths[:, None]
        places = np.where(visible, places, 0)
        slots = np.stack(
            [table[row // self.tokens_per_block] for row, (_, _, table) in zip(places, group, strict=True)]
        )
        return Decode(
            rows=self._tensor([row for _, row, _ in group]),
            slots=self._tensor(slots.astype(np.int64)),
            offsets=self._tensor(places % self.tokens_per_block),
            mask=torch.from_numpy(visible[:, None, None]).to(self.device),
        )

    def _tensor(self, numbers: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(numbers, dtype=np.int64), device=self.device)


def similar_lengths(
    single: SequenceOf[tuple[int, int, NDArray[np.int32]]],
) -> list[list[tuple[int, int, NDArray[np.int32]]]]:
    """Groups whose longest context has at most MAX_PADDING times the tokens of the shortest."""
    groups: list[list[tuple[int, int, NDArray[np.int32]]]] = []
    for item in sorted(single, key=lambda entry: entry[0]):
        if groups and item[0] <= MAX_PADDING * groups[-1][0][0]:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups
