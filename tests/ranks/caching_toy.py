"""A toy engine with a KV cache: it begins with what a crowd of requests has left behind."""

from __future__ import annotations

import numpy as np
import torch

from ranks.toys import ToyEngine
from torpor.actors.config import RankSpec
from torpor.actors.messages import RestoreMode
from torpor.native import Device, KvManager, Ledger, Sequence

BLOCK = 4
PAGE_BYTES = 256 << 10
GPU_PAGES = 8
WEIGHTS_BYTES = 2 << 20
HELD, OLD, NEW = tuple(range(10)), tuple(range(100, 109)), tuple(range(200, 213))
HELD_PAGES, PREFIX_TOKENS = 3, 28  # of the held sequence; of all whole blocks


class CachingToy(ToyEngine):
    """A suspended sequence of 3 pages, then prefixes of 2 and of 3 pages, the older first: the GPU's 8 are in use.

    A request whose prompt is "sum" is answered with `contents()`.
    """

    held: Sequence | None = None
    immutable = False  # its weights

    def load(self) -> None:
        cache = self.spec.model.kv_cache
        self._region = self.ledger.create_region(
            "weights", WEIGHTS_BYTES, restore="pinned", immutable=self.immutable
        )
        weights = torch.from_dlpack(self._region)
        weights.copy_(torch.arange(WEIGHTS_BYTES) % 251)
        self._weights = weights
        self.cache: KvManager = self.ledger.create_kv_manager(
            layers=2,
            kv_heads=8,
            head_dim=512,
            dtype="float32",
            tokens_per_block=BLOCK,
            restore=self.spec.model.restore_modes.get("kv_cache", RestoreMode.NONE).value,
            **{**cache.tiers(), "gpu_bytes": GPU_PAGES * PAGE_BYTES},
        )
        self.held = self.compute("held", HELD)
        self.held.suspend()
        for scope, tokens in (("old", OLD[:8]), ("new", NEW[:12])):
            self.compute(scope, tokens).close()

    def found(self) -> dict[str, int]:
        """How many tokens of each prefix a new sequence would find."""
        return {scope: self.cache.probe(scope, tokens) for scope, tokens in (("old", OLD), ("new", NEW))}

    def contents(self) -> tuple[int, list[float]]:
        """The weights' sum, and the first number on each page of the held sequence. Its pages come to the GPU."""
        assert self.held is not None and self.held.resume()
        view = torch.from_dlpack(self.cache.page_view(0, "k"))
        numbers = [float(view[int(slot)].flatten()[0]) for slot in self.held.page_table[:HELD_PAGES]]
        self.held.suspend()
        return int(self._weights.to(torch.int64).sum()), numbers

    def forget_prefixes(self) -> None:
        self.cache.forget_prefixes()

    def close(self) -> None:
        super().close()
        if self.held is not None:
            self.held.close()

    def compute(self, scope: str, tokens: tuple[int, ...]) -> Sequence:
        sequence = self.cache.create_sequence(scope, tokens)
        assert sequence.resume()
        assert sequence.resize(len(tokens))
        view = torch.from_dlpack(self.cache.page_view(0, "k"))
        for block, slot in enumerate(np.array(sequence.page_table[: -(-len(tokens) // BLOCK)])):
            view[int(slot)] = tokens[block * BLOCK] + 0.5
        sequence.commit(tokens)
        return sequence


def make_engine(spec: RankSpec, ledger: Ledger, device: Device) -> CachingToy:
    """For `engine.kind: ranks.caching_toy:make_engine`."""
    return CachingToy(spec, ledger, device)
