"""One forward's tokens, packed into a single row, and where their K and V lie."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from torpor.actors.engine.plan import Chunk
from torpor.actors.engine.reading import Reader, Reads, Stretch
from torpor.actors.engine.states import SlotStates
from torpor.native import KvManager, LayerSpec

Tables = SequenceOf[NDArray[np.int32]]  # one sequence's page tables, by life cycle


@dataclass(frozen=True, slots=True)
class Places:
    """Of the layers of one life cycle: where the new tokens' K and V go, and what they attend to.

    window: tokens that one of them sees, itself included; None: all. new_slots, new_offsets: (T,).
    """

    window: int | None
    new_slots: torch.Tensor
    new_offsets: torch.Tensor
    reads: Reads


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

    def __init__(
        self, manager: KvManager, specs: SequenceOf[LayerSpec], device: torch.device, reader: Reader
    ) -> None:
        """specs: those that the manager was made of."""
        self._reader = reader
        self.cycles = list(enumerate(manager.life_cycles))
        views = [
            {buffer.role: from_dlpack(manager.page_view(layer, buffer.role)) for buffer in spec.buffers}
            for layer, spec in enumerate(specs)
        ]
        self.keys = {layer: view["k"] for layer, view in enumerate(views) if "k" in view}
        self.values = {layer: view["v"] for layer, view in enumerate(views) if "v" in view}
        self.states = {layer: views[layer] for layer, spec in enumerate(specs) if spec.kind == "state"}
        self.tokens_per_block = manager.tokens_per_block
        self.device = device

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
        for index, cycle in self.cycles:
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
        stretches = [
            Stretch(end - len(chunk.tokens), len(chunk.tokens), chunk.start, table)
            for chunk, table, end in zip(chunks, tables, ends, strict=True)
        ]
        return Places(
            window=window,
            new_slots=self._tensor(np.concatenate(slots)),
            new_offsets=offsets,
            reads=self._reader(stretches, window, self.tokens_per_block, self.device),
        )

    def _slots(self, table: NDArray[np.int32], start: int, count: int) -> NDArray[np.int64]:
        slots = table[np.arange(start, start + count) // self.tokens_per_block].astype(np.int64)
        if slots.min() < 0:
            raise AssertionError(f"tokens {start} to {start + count} lie beyond the pages of their sequence")
        return slots

    def _tensor(self, numbers: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(numbers, dtype=np.int64), device=self.device)
