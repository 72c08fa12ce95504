"""Making the engine that a rank's configuration names."""

from __future__ import annotations

from torpor.actors.config import RankSpec
from torpor.actors.engine.errors import ModelRefused
from torpor.actors.engine.protocol import Engine
from torpor.native import Device, Ledger


def make_engine(spec: RankSpec, ledger: Ledger, device: Device) -> Engine:
    """The engine that `spec.model.engine.kind` names. Takes no device memory yet. Raises ModelRefused."""
    if spec.model.engine.kind != "transformers":
        raise ModelRefused(f"engine.kind {spec.model.engine.kind!r} is unknown; known: transformers")
    # Here, not above: torch and transformers take seconds to import.
    from torpor.actors.engine.engine import TransformersEngine

    return TransformersEngine(spec, ledger, device)
