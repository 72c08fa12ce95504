"""Changes of what models there are to be, as far as no rank is touched by them."""

from __future__ import annotations

from collections.abc import Mapping

from torpor.actors.changes import shape_differences
from torpor.actors.config import ModelConfig
from torpor.actors.coordinator.journal import Journal
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.ports import ModelExists


async def adapted(models: Mapping[str, ModelRuntime], journal: Journal, wanted: ModelConfig) -> ModelRuntime:
    """The model with other policies, in the journal when this returns. Raises KeyError, ModelExists."""
    known = models.get(wanted.name)
    if known is None or known.deleting:
        raise KeyError(f"no model {wanted.name!r}")
    shape = ", ".join(difference.key for difference in shape_differences(known.config, wanted))
    if shape:
        raise ModelExists(f"a model {wanted.name!r} is there with another shape ({shape}); delete it first")
    await journal.add_model(wanted)
    known.config = wanted
    return known
