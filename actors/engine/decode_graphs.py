"""Decoding by captured CUDA graphs, one for each of a few batch sizes, whose scratch sleeps under a tag of its own."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import torch

from torpor.actors.config import GIB, EngineConfig
from torpor.actors.engine.batch import PagedBatch, Tables
from torpor.actors.engine.decode_inputs import DecodeInputs
from torpor.actors.engine.errors import ModelRefused
from torpor.actors.engine.families import Family
from torpor.actors.engine.plan import Chunk
from torpor.native import Ledger, MemoryPool

TAG = "cuda_graph"
SETTINGS = ("auto", "off")  # of `engine.cuda_graphs`
MOST_SEQUENCES = 256  # in one graph
POOL_RESERVE_BYTES = 64 * GIB  # of addresses
Forward = Callable[[], torch.Tensor]
Capture = Callable[[Forward], Forward]  # to what computes the same again, into the same tensor


def check_setting(wanted: str) -> None:
    """wanted: as `engine.cuda_graphs` has it. Raises ModelRefused."""
    if wanted not in SETTINGS:
        raise ModelRefused(f"engine.cuda_graphs {wanted!r} is unknown; known: {', '.join(SETTINGS)}")


def why_off(
    engine: EngineConfig, family: Family, config: Any, ranks: int, device: str, attention: str
) -> str:
    """Why a model decodes without graphs; "" if it does not. device: torch's type. attention: the implementation that
    was chosen."""
    if engine.cuda_graphs == "off":
        return "engine.cuda_graphs is off"
    if device != "cuda":
        return "a host device has none"
    if ranks > 1:
        return "sums over ranks go through gloo, on the host"
    if attention != "triton":
        return f"attention by {attention} reads sizes on the host"
    if family.experts and any(getattr(config, name, 0) for name in family.experts):
        return "tokens are dealt out to experts on the host"
    return ""


class DecodeGraphs:
    """Used from one thread at a time. The result of a replay is good until the next one, or a sleep."""

    def __init__(self, inputs: DecodeInputs, most_sequences: int, capture: Capture) -> None:
        self._inputs = inputs
        self._buckets = buckets(most_sequences)
        self._capture = capture
        self._forwards: dict[int, Forward] = {}
        self.replays = 0

    def capture_all(self, run: Callable[[PagedBatch], torch.Tensor | None]) -> None:
        """run: computes a batch, and the logits of its logit_rows. Before there are sequences: it writes to the first
        slot of each pool. The largest first, in whose scratch the others find room."""
        for lines in reversed(self._buckets):
            forward: Callable[[], Any] = partial(run, self._inputs.batch(lines))
            self._forwards[lines] = self._capture(forward)

    def fits(self, chunks: SequenceOf[Chunk]) -> bool:
        return len(chunks) <= self._buckets[-1] and all(
            len(chunk.tokens) == 1 and chunk.wants_logits for chunk in chunks
        )

    def replay(self, chunks: SequenceOf[Chunk], tables: SequenceOf[Tables]) -> torch.Tensor:
        """chunks: some that `fits`. Returns (chunks, vocabulary)."""
        lines = next(lines for lines in self._buckets if lines >= len(chunks))
        self._inputs.fill(chunks, tables, lines)
        self.replays += 1
        return self._forwards[lines]()[: len(chunks)]


def buckets(most_sequences: int) -> list[int]:
    """Powers of two, the last of which holds them all, if MOST_SEQUENCES allows."""
    highest = (min(most_sequences, MOST_SEQUENCES) - 1).bit_length()
    return [1 << power for power in range(highest + 1)]


class CudaCapture:
    """Captures forwards on one CUDA device, with their scratch in a pool that sleeps (S1)."""

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._device = device
        self._pool = MemoryPool(ledger, TAG, POOL_RESERVE_BYTES, name="scratch")
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, forward: Forward) -> Forward:
        with torch.cuda.device(self._device):
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                forward()  # compiles and loads kernels, which no capture may
            here.wait_stream(self._stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool.id, capture_error_mode="thread_local"):
                output = forward()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay
