"""One forward's tokens, packed into a single row, and where their K and V lie."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from torpor.actors.engine.plan import Chunk
from torpor.actors.engine.states import SlotStates
from torpor.native import KvManager, LayerSpec

MAX_PADDING = (
    2  # sequences decode together while the longest has at most this many times the tokens of the shortest
)
Tables = SequenceOf[NDArray[np.int32]]  # one sequence's page tables, by life cycle


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
class Places:
    """Of the layers of one life cycle: where the new tokens' K and V go, and what they attend to.

    window: tokens that one of them sees, itself included; None: all. new_slots, new_offsets: (T,).
    """

    window: int | None
    new_slots: torch.Tensor
    new_offsets: torch.Tensor
    prefills: tuple[Prefill, ...]
    decodes: tuple[Decode, ...]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """keys, values: by layer one (slots, tokens_per_block, kv_heads, head_dim) view. places: by layer.

    input_ids, position_ids: (1, T); or (T, 1), of as many sequences, where states must be kept apart.
    states: where layers have some.
    """

    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    places: dict[int, Places]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    states: SlotStates | None
    logit_rows: torch.Tensor  # (n,) rows whose logits are wanted, in the order of the chunks


class Pages:
    """The manager's pools as tensors, at addresses that never change."""

    def __init__(self, manager: KvManager, specs: SequenceOf[LayerSpec], device: torch.device) -> None:
        """specs: those that the manager was made of."""
        self._cycles = list(enumerate(manager.life_cycles))
        views = [
            {buffer.role: from_dlpack(manager.page_view(layer, buffer.role)) for buffer in spec.buffers}
            for layer, spec in enumerate(specs)
        ]
        self.keys = {layer: view["k"] for layer, view in enumerate(views) if "k" in view}
        self.values = {layer: view["v"] for layer, view in enumerate(views) if "v" in view}
        self.states = {layer: views[layer] for layer, spec in enumerate(specs) if spec.kind == "state"}
        self.tokens_per_block = manager.tokens_per_block
        self.device = device

    def synchronize(self) -> None:
        """Until what was computed lies in the pages: the manager copies and moves them on streams of its own."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forwards(self, chunks: SequenceOf[Chunk]) -> list[list[int]]:
        """Which chunks may share a forward, by index. States of sequences that read prompts would run together."""
        if not self.states:
            return [list(range(len(chunks)))]
        long = [[index] for index, chunk in enumerate(chunks) if len(chunk.tokens) > 1]
        single = [index for index, chunk in enumerate(chunks) if len(chunk.tokens) == 1]
        return [*long, *([single] if single else [])]

    def batch(self, chunks: SequenceOf[Chunk], tables: SequenceOf[Tables]) -> PagedBatch:
        """tables: those of each chunk's sequence, covering all its visible tokens up to the chunk's end.

        The chunks are those of one of `forwards`.
        """
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions = np.concatenate([np.arange(c.start, c.start + len(c.tokens)) for c in chunks])
        ends = [int(end) for end in np.cumsum([len(chunk.tokens) for chunk in chunks])]
        offsets = self._tensor(positions % self.tokens_per_block)
        rows = (len(chunks), -1) if self.states else (1, -1)
        places: dict[int, Places] = {}
        slots: dict[int, torch.Tensor] = {}
        for index, cycle in self._cycles:
            if cycle["kind"] == "state":
                slots |= dict.fromkeys(cycle["layers"], self._tensor([table[index][0] for table in tables]))
                continue
            window = int(cycle["window"]) or None
            made = self._places(chunks, [table[index] for table in tables], ends, offsets, window)
            places |= dict.fromkeys(cycle["layers"], made)
        return PagedBatch(
            keys=self.keys,
            values=self.values,
            places=places,
            input_ids=self._tensor(tokens).reshape(rows),
            position_ids=self._tensor(positions).reshape(rows),
            states=SlotStates(self.states, slots) if slots else None,
            logit_rows=self._tensor(
                [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.wants_logits]
            ),
        )

    def _places(
        self,
        chunks: SequenceOf[Chunk],
        tables: Tables,
        ends: SequenceOf[int],
        offsets: torch.Tensor,
        window: int | None,
    ) -> Places:
        slots = [self._slots(t, c.start, len(c.tokens)) for c, t in zip(chunks, tables, strict=True)]
        prefills: list[Prefill] = []
        single: list[Single] = []
        for chunk, table, end in zip(chunks, tables, ends, strict=True):
            if len(chunk.tokens) == 1:
                seen = chunk.start + 1 if window is None else min(chunk.start + 1, window)
                single.append(Single(seen, chunk.start + 1 - seen, end - 1, table))
            else:
                prefills.append(self._prefill(chunk, table, end, window))
        return Places(
            window=window,
            new_slots=self._tensor(np.concatenate(slots)),
            new_offsets=offsets,
            prefills=tuple(prefills),
            decodes=tuple(self._decode(group) for group in similar_lengths(single)),
        )

    def _slots(self, table: NDArray[np.int32], start: int, count: int) -> NDArray[np.int64]:
        slots = table[np.arange(start, start + count) // self.tokens_per_block].astype(np.int64)
        if slots.min() < 0:
            raise AssertionError(f"tokens {start} to {start + count} lie beyond the pages of their sequence")
        return slots

    def _prefill(self, chunk: Chunk, table: NDArray[np.int32], end: int, window: int | None) -> Prefill:
        new, context = len(chunk.tokens), chunk.start + len(chunk.tokens)
        first = 0 if window is None else max(chunk.start + 1 - window, 0) // self.tokens_per_block
        blocks = table[first : -(-context // self.tokens_per_block)].astype(np.int64)
        before = chunk.start - first * self.tokens_per_block  # tokens of the context that are not new
        mask = None
        if before or (window is not None and window < new):
            mask = torch.ones(new, before + new, dtype=torch.bool, device=self.device).tril(before)
            if window is not None:
                mask = mask.triu(before + 1 - window)
        return Prefill(slice(end - new, end), self._tensor(blocks), before + new, mask)

    def _decode(self, group: SequenceOf[Single]) -> Decode:
        lengths = np.array([one.context_tokens for one in group])
        firsts = np.array([one.first for one in group])
        places = np.arange(lengths.max())[None].repeat(len(group), axis=0)
        visible = places < lengths[:, None]
        places = firsts[:, None] + np.where(visible, places, 0)
        slots = np.stack(
            [one.table[row // self.tokens_per_block] for row, one in zip(places, group, strict=True)]
        )
        return Decode(
            rows=self._tensor([one.row for one in group]),
            slots=self._tensor(slots.astype(np.int64)),
            offsets=self._tensor(places % self.tokens_per_block),
            mask=torch.from_numpy(visible[:, None, None]).to(self.device),
        )

    def _tensor(self, numbers: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(numbers, dtype=np.int64), device=self.device)


@dataclass(frozen=True, slots=True)
class Single:
    """One new token: what it sees begins at position `first`; its place in the packed row; its sequence's pages."""

    context_tokens: int
    first: int
    row: int
    table: NDArray[np.int32]


def similar_lengths(single: SequenceOf[Single]) -> list[list[Single]]:
    """Groups whose longest context has at most MAX_PADDING times the tokens of the shortest."""
    groups: list[list[Single]] = []
    for item in sorted(single, key=lambda entry: entry.context_tokens):
        if groups and item.context_tokens <= MAX_PADDING * groups[-1][0].context_tokens:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups
