"""From `engine.kind` to an engine: the one that ships, or anybody's, named "package.module:factory"."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from torpor.actors.config import RankSpec
from torpor.actors.engine.protocol import Engine
from torpor.native import Device, Ledger

EngineFactory = Callable[[RankSpec, Ledger, Device], Engine]


class UnknownEngine(Exception):
    """No engine of this kind; the text says what is understood."""


def make_engine(spec: RankSpec, ledger: Ledger, device: Device) -> Engine:
    """Build the configured engine. It takes no device memory before its `load`."""
    return factory_of(spec.model.engine.kind)(spec, ledger, device)


def factory_of(kind: str) -> EngineFactory:
    """Raises UnknownEngine."""
    module, separator, name = (
        ("torpor.actors.engine", ":", "make_engine") if kind == "transformers" else kind.partition(":")
    )
    if not separator:
        raise UnknownEngine(
            f"engine.kind is {kind!r}; use transformers, or package.module:factory of your own"
        )
    try:
        return cast("EngineFactory", getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise UnknownEngine(f"engine.kind {kind!r} cannot be imported: {error}") from error
