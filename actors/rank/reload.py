"""Weights that a wake reads from their source again, since their memory comes back without contents (C9)."""

from __future__ import annotations

from dataclasses import dataclass

from torpor.actors.engine.protocol import Engine, OwnSource, WeightsRefused
from torpor.actors.messages import Kind, OnDiscard, OperationRequest

TAG = "weights"
LATE = "the weights could not be read from their source in time; allow more with timeout_s"
OTHERWISE = "or with on_discard wait, and update the weights then"


@dataclass(frozen=True, slots=True)
class Reload:
    """others: these are other weights than those that were there, so that what those computed goes with them."""

    source: OwnSource
    others: bool


def plan_reload(request: OperationRequest, undefined: bool, version: int, engine: Engine) -> Reload | None:
    """None where the weights need none, or stay without contents until the next update.

    undefined: whether they would be there without contents. version: updates since they were loaded. Reads no
    contents. Raises WeightsRefused where the source is not there, or not what was loaded.
    """
    wanted = request.kind is Kind.WAKE and request.on_discard is OnDiscard.RELOAD
    if not wanted or not undefined or (version and not request.accept_stale_weights):
        return None
    try:
        source = engine.check_source()
    except WeightsRefused as error:
        raise WeightsRefused(f"the weights cannot be read again: {error}; mend it, {OTHERWISE}") from error
    if source.changed and not request.accept_stale_weights:
        raise WeightsRefused(
            f"the source of the weights has changed since they were loaded ({source.place}); wake with "
            f"accept_stale_weights to take it as it is now, {OTHERWISE}"
        )
    return Reload(source, bool(version) or source.changed)
