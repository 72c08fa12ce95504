"""One rank's module and pages: a step's chunks in, logits out."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from torpor.actors.engine.batch import PagedBatch, Pages
from torpor.actors.engine.decode_graphs import DecodeGraphs
from torpor.actors.engine.plan import Chunk
from torpor.actors.engine.sequences import SequenceBook


class ModelRunner:
    """Runs forwards in the thread that calls it. All ranks run the same chunks; only the leader makes logits."""

    def __init__(
        self,
        module: Any,
        pages: Pages,
        book: SequenceBook,
        makes_logits: bool,
        synchronize: Callable[[], None],
    ) -> None:
        """synchronize: waits until what was computed lies in the pages."""
        self._module = module
        self._pages = pages
        self._book = book
        self._makes_logits = makes_logits
        self._synchronize = synchronize
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture(self, graphs: DecodeGraphs) -> None:
        """Decode by these from now on. Before there are sequences."""
        graphs.capture_all(self._run)
        self._synchronize()
        self._graphs = graphs

    def close(self) -> None:
        """Let graphs go. It is used no more."""
        if self._graphs is not None:
            self._graphs.close()

    @torch.inference_mode()
    def forward(self, chunks: SequenceOf[Chunk]) -> torch.Tensor | None:
        """Write the chunks' K, V and states. Returns (n, vocabulary) for those that want logits, None on followers."""
        parts = self._pages.forwards(chunks)
        if len(parts) == 1:  # of all, in their order
            logits = self._forward(chunks)
            self._synchronize()
            return logits
        rows: dict[int, torch.Tensor] = {}
        for indices in parts:
            logits = self._forward([chunks[index] for index in indices])
            if logits is not None:
                wanted = [index for index in indices if chunks[index].wants_logits]
                # A replay's are good until the next one; there is one part for it, the last.
                rows |= dict(zip(wanted, logits, strict=True))
        self._synchronize()
        return torch.stack([rows[index] for index in sorted(rows)]) if rows else None

    def _forward(self, chunks: SequenceOf[Chunk]) -> torch.Tensor | None:
        tables = [self._book.tables(chunk.key) for chunk in chunks]
        if self._graphs is not None and self._graphs.fits(chunks):
            return self._graphs.replay(chunks, tables)
        return self._run(self._pages.batch(chunks, tables))

    def _run(self, batch: PagedBatch) -> torch.Tensor | None:
        """(n, vocabulary) for the batch's logit_rows; None when there are none, and on followers."""
        keywords: dict[str, Any] = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "past_key_values": batch.states,
            "use_cache": False,
            "paged_batch": batch,
        }
        logits: torch.Tensor | None = None
        if not self._makes_logits or not len(batch.logit_rows):
            self._module.model(**keywords)
        elif len(batch.input_ids) == 1:
            logits = self._module(**keywords, logits_to_keep=batch.logit_rows).logits[0]
        else:
            logits = self._module(**keywords).logits[batch.logit_rows, 0]
        if batch.states is not None:
            batch.states.put_back()
        return logits
