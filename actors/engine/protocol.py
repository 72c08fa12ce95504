"""What a rank asks of its engine, and a step's plan as the leader sends it to the followers.

An engine runs in one thread of its rank (the step loop), but `submit`, `cancel` and `drain` calls come from others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torpor.actors.messages import EngineChoices, GenerateRequest, TokenEvent

EventSink = Callable[[Sequence[TokenEvent]], None]  # called from the step thread; must not block


class InvalidPrompt(Exception):
    """The engine cannot serve this request as it is; the text says why and what to do."""


class PromptTooLong(InvalidPrompt):
    """Longer than the model's context or its KV pool, alone or with the tokens asked for."""


class WeightsRefused(Exception):
    """These weights are not for this model, or cannot be read; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype: as torch names it, such as "float32"."""

    shape: tuple[int, ...]
    dtype: str


class HandedTensors(Protocol):
    """Whole tensors, not cut for ranks, that somebody in another process hands over."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """By the names of the checkpoint. Raises WeightsRefused when nobody is there to ask."""

    def get(self, name: str) -> Any:
        """A torch.Tensor in host memory."""


WeightsSource = Path | HandedTensors


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """This rank's share, read and checked. digest: the same on all ranks that have read the same weights."""

    digest: str
    size_bytes: int
    tensors: Mapping[str, Any]  # by parameter


@dataclass(frozen=True, slots=True)
class OwnSource:
    """What the engine's weights were loaded from, as it is now. digest: the same on all ranks that would read the same.

    changed: since it was loaded. place: for people.
    """

    place: str
    digest: str
    size_bytes: int  # of this rank's share
    host_bytes: int  # that reading it takes
    changed: bool = False


class Engine(Protocol):
    """One rank's share of a model. Rank 0 schedules; the others follow its steps.

    Life: construct (no device memory) → load() → start(sink) → … → close().
    """

    def load(self) -> None:
        """Read or make the weights, adopt them into the ledger, make the KV manager, join the process group."""

    def start(self, sink: EventSink) -> None:
        """Start the step thread. The sink is used on the leader only."""

    def prepare(self, request: GenerateRequest) -> object:
        """Leader: tokenise and check, off the step thread. Raises InvalidPrompt. The result goes to `submit`."""

    def submit(self, prepared: object) -> None:
        """Leader: put it on the waiting list. Never blocks. The rank's gate has admitted it."""

    def cancel(self, request_id: str) -> None:
        """Leader: end it with finish reason abort at the next step boundary; unknown ids are ignored."""

    def running(self) -> int:
        """Requests submitted and not yet finished."""

    def waiting(self) -> int:
        """Of them, those that have not begun."""

    def quiesce(self, timeout_s: float) -> int:
        """Stop between two steps and stay there; returns the step number. Raises TimeoutError. Idempotent.

        Requests that run are frozen: they keep what they have, and their sequences are suspended on every rank.

        The device is idle afterwards. `resume` goes on.
        """

    def resume(self) -> None:
        """Go on stepping after quiesce. Frozen requests whose K and V were discarded are computed again."""

    def reap(self, allowed: bool) -> None:
        """Leader, while it rests: whether cancelled requests end and let go of their sequences, on all ranks.

        Else they wait for `reap(True)` or `resume`. With False it returns when none is under way any more.
        """

    def refresh(self) -> None:
        """After a wake's contents are back: recompute what depends on them. Repeatable."""

    def check_weights(self, source: WeightsSource) -> tuple[str, int]:
        """What can be seen without reading contents; traffic runs. A digest, and the bytes of this rank's share.

        Raises WeightsRefused.
        """

    def stage_weights(self, source: WeightsSource, go_on: Callable[[], None]) -> StagedWeights:
        """At rest: read and check all that `write_weights` will need; nothing of the model changes.

        go_on raises when the stage is to end. Raises WeightsRefused.
        """

    def write_weights(self, staged: StagedWeights) -> None:
        """At rest: write in place, forget all prefixes, and let frozen requests be computed anew. Repeatable."""

    def forget_prefixes(self) -> None:
        """At rest: no tier serves a prefix any more, and frozen requests are computed anew. Repeatable."""

    def check_source(self) -> OwnSource:
        """Without reading contents; traffic may run. Raises WeightsRefused where it cannot be read any more."""

    def reload_weights(self, go_on: Callable[[], None]) -> str:
        """In a wake's stage, with the memory there: read the own weights again, in place. May be repeated.

        A digest, the same on all ranks that have read the same weights. go_on raises when the stage is to end, and
        is called between pieces of at most 64 MiB. Raises WeightsRefused.
        """

    def choices(self) -> EngineChoices:
        """Of a loaded one; what it took by itself."""

    def weights_changed(self, others: bool) -> None:
        """At rest, awake: copies of the former contents hold no longer. others: nor does what those have computed."""

    def error(self) -> str:
        """Why the step loop died, or ""."""

    def close(self) -> None:
        """End the step thread, leave the process group, drop the memory."""
