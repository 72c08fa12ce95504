"""One rank's module and pages: a step's chunks in, logits out."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from torpor.actors.engine.batch import Pages
from torpor.actors.engine.plan import Chunk
from torpor.actors.engine.sequences import SequenceBook


class ModelRunner:
    """Runs forwards in the thread that calls it. All ranks run the same chunks; only the leader makes logits."""

    def __init__(self, module: Any, pages: Pages, book: SequenceBook, makes_logits: bool) -> None:
        self._module = module
        self._pages = pages
        self._book = book
        self._makes_logits = makes_logits

    @torch.inference_mode()
    def forward(self, chunks: SequenceOf[Chunk]) -> torch.Tensor | None:
        """Write the chunks' K and V. Returns (n, vocabulary) for the chunks that want logits, None on followers."""
        batch = self._pages.batch(chunks, [self._book.tables(chunk.key) for chunk in chunks])
        keywords = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "use_cache": False,
            "paged_batch": batch,
        }
        if not self._makes_logits or not len(batch.logit_rows):
            self._module.model(**keywords)
            return None
        logits: torch.Tensor = self._module(**keywords, logits_to_keep=batch.logit_rows).logits
        return logits[0]
