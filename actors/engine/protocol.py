"""What a rank asks of its engine, and a step's plan as the leader sends it to the followers.

An engine runs in one thread of its rank (the step loop), but `submit`, `cancel` and `drain` calls come from others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torpor.actors.messages import GenerateRequest, TokenEvent

EventSink = Callable[[Sequence[TokenEvent]], None]  # called from the step thread; must not block


class InvalidPrompt(Exception):
    """The engine cannot serve this request as it is; the text says why and what to do."""


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

    def error(self) -> str:
        """Why the step loop died, or ""."""

    def close(self) -> None:
        """End the step thread, leave the process group, drop the memory."""
