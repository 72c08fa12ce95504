"""What the engine refuses, beside `InvalidPrompt` (protocol.py)."""

from __future__ import annotations

from torpor.native.errors import TorporError


class ModelRefused(TorporError):
    """This model cannot be served as configured. Raised before any device memory is taken."""


class RanksDisagree(TorporError):
    """A follower did not reach the state that the leader's step plan told it to."""


class StepLoopDied(TorporError):
    """The step loop of this rank has ended; the text says why. The model must be recovered."""
