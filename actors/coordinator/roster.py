"""What models there are to be: made, and given other policies, while the service runs. They go by a delete."""

from __future__ import annotations

import asyncio

from torpor.actors.changes import shape_differences
from torpor.actors.config import ModelConfig
from torpor.actors.coordinator.feed import Feed
from torpor.actors.coordinator.journal import Journal
from torpor.actors.coordinator.lives import Lives
from torpor.actors.coordinator.records import Published
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.messages import ModelView
from torpor.actors.ports import ModelExists


class Roster:
    """submitting: held while operations are accepted, so that none meets a model that is half there."""

    def __init__(
        self,
        models: dict[str, ModelRuntime],
        journal: Journal,
        feed: Feed,
        lives: Lives | None,
        submitting: asyncio.Lock,
    ) -> None:
        self._models = models
        self._journal = journal
        self._feed = feed
        self._lives = lives
        self._submitting = submitting

    async def create(self, model: ModelConfig) -> ModelView:
        """In the journal when this returns, and loading. Raises ModelExists."""
        if self._lives is None:
            raise RuntimeError("this coordinator makes no ranks")
        async with self._submitting:
            known = self._models.get(model.name)
            if known is not None and (known.config != model or known.deleting):
                state = "is being deleted" if known.deleting else "is there, with another configuration"
                raise ModelExists(f"a model {model.name!r} {state}; create it when that one is deleted")
            if known is None:
                await self._journal.add_model(model)
                known = self._models[model.name] = ModelRuntime(model, Published(model.name))
                self._lives.begin(known)
                self._feed.add(model=known.view())
            return known.view()

    async def adapt(self, model: ModelConfig) -> ModelView:
        """Other policies, in the journal when this returns. Raises KeyError, ModelExists."""
        async with self._submitting:
            known = self._models.get(model.name)
            if known is None or known.deleting:
                raise KeyError(f"no model {model.name!r}")
            shape = ", ".join(difference.key for difference in shape_differences(known.config, model))
            if shape:
                raise ModelExists(
                    f"a model {model.name!r} is there with another shape ({shape}); delete it first"
                )
            await self._journal.add_model(model)
            known.config = model
            self._feed.add(model=known.view())
            return known.view()
