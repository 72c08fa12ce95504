"""Decoding by captured CUDA graphs, one for each of a few numbers of tokens, over scratch that sleeps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext

import torch

from torpor.actors.config import GIB, EngineConfig
from torpor.actors.engine.batch import PagedBatch, Tables
from torpor.actors.engine.decode_inputs import DecodeInputs
from torpor.actors.engine.errors import ModelRefused
from torpor.actors.engine.group import NCCL
from torpor.actors.engine.plan import Chunk
from torpor.native import Ledger, MemoryPool

TAG = "cuda_graph"
AUTO, ON, OFF = "auto", "on", "off"
SETTINGS = (AUTO, ON, OFF)  # of `engine.cuda_graphs`
MOST_LINES = 256  # in one graph
# What is left to read of a known prompt, or a short one: each token attends by itself, over all that is before it.
SHORT_TOKENS = 32
POOL_RESERVE_BYTES = 64 * GIB  # of addresses
UNTRIED = "have been captured on no GPU yet; engine.cuda_graphs: on does it nevertheless"
Forward = Callable[[], torch.Tensor | None]
Capture = Callable[[Forward], Forward]  # to what computes the same again, into the same tensor
Computing = Callable[[int], AbstractContextManager[None]]  # what forwards of so many lines run within


def check_setting(wanted: str) -> None:
    """wanted: as `engine.cuda_graphs` has it. Raises ModelRefused."""
    if wanted not in SETTINGS:
        raise ModelRefused(f"engine.cuda_graphs {wanted!r} is unknown; known: {', '.join(SETTINGS)}")


def why_off(
    engine: EngineConfig,
    ranks: int,
    device: str,
    attention: str,
    backend: str,
) -> str:
    """Why a model decodes without graphs; "" if it does not. device: torch's type. attention: the implementation that
    was chosen. backend: of sums over ranks."""
    if engine.cuda_graphs == OFF:
        return "engine.cuda_graphs is off"
    if device != "cuda":
        return "a host device has none"
    if ranks > 1 and backend != NCCL:
        return f"sums over ranks go through {backend}, on the host"
    if attention != "triton":
        return f"attention by {attention} reads sizes on the host"
    if engine.cuda_graphs == ON:
        return ""
    return f"sums over ranks {UNTRIED}" if ranks > 1 else ""


class DecodeGraphs:
    """Used from one thread at a time. The result of a replay is good until the next one, or a sleep."""

    def __init__(
        self,
        inputs: DecodeInputs,
        most_lines: int,
        capture: Capture,
        computing: Computing = lambda lines: nullcontext(),
    ) -> None:
        """computing: enters what a forward of so many lines needs around it."""
        self._inputs = inputs
        self._buckets = buckets(most_lines)
        self._capture = capture
        self._computing = computing
        self._short_tokens = 1 if inputs.has_states else SHORT_TOKENS
        self._forwards: dict[int, Forward] = {}
        self.replays = 0

    def capture_all(self, run: Callable[[PagedBatch], torch.Tensor | None]) -> None:
        """run: computes a batch, and the logits of its logit_rows. Before there are sequences: it writes to the first
        slot of each pool. The largest first, in whose scratch the others find room."""
        for lines in reversed(self._buckets):
            self._forwards[lines] = self._capture(self._forward(run, lines))

    def fits(self, chunks: SequenceOf[Chunk]) -> bool:
        """Whether some bucket holds all their tokens, each on a line of its own."""
        counts = [len(chunk.tokens) for chunk in chunks]
        return sum(counts) <= self._buckets[-1] and max(counts) <= self._short_tokens

    def replay(self, chunks: SequenceOf[Chunk], tables: SequenceOf[Tables]) -> torch.Tensor | None:
        """chunks: some that `fits`. Returns (n, vocabulary) for those that want logits, None where there are none."""
        used = sum(len(chunk.tokens) for chunk in chunks)
        lines = next(lines for lines in self._buckets if lines >= used)
        self._inputs.fill(chunks, tables, lines)
        self.replays += 1
        logits = self._forwards[lines]()
        wanted = _last_lines(chunks)
        if logits is None or not wanted:
            return None
        if wanted == list(range(len(wanted))):
            return logits[: len(wanted)]
        return logits[torch.tensor(wanted, device=logits.device)]

    def close(self) -> None:
        """Let the graphs go, before the process group whose sums they hold."""
        self._forwards.clear()

    def _forward(self, run: Callable[[PagedBatch], torch.Tensor | None], lines: int) -> Forward:
        batch = self._inputs.batch(lines)

        def forward() -> torch.Tensor | None:
            with self._computing(lines):
                return run(batch)

        return forward


def _last_lines(chunks: SequenceOf[Chunk]) -> list[int]:
    """Of those chunks that want logits."""
    lines, end = [], 0
    for chunk in chunks:
        end += len(chunk.tokens)
        if chunk.wants_logits:
            lines.append(end - 1)
    return lines


def buckets(most_lines: int) -> list[int]:
    """Powers of two, the last of which holds them all, if MOST_LINES allows."""
    highest = (min(most_lines, MOST_LINES) - 1).bit_length()
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

        def replay() -> torch.Tensor | None:
            graph.replay()
            return output

        return replay
