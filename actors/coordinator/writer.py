"""Writes what has become so already, outcomes and published states; what cannot be written now, as soon as it can be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from torpor.actors.coordinator.journal import Journal, JournalError
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.messages import Operation

log = logging.getLogger(__name__)
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Writer:
    """Never raises JournalError: memory and ranks are as they are, whatever is written of it.

    Should the coordinator end before it could write, the next one finds the operation open, and settles it alike by
    what the ranks tell. spawn: runs work in the background.
    """

    def __init__(self, journal: Journal, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._journal = journal
        self._spawn = spawn
        self._outcomes: dict[str, Operation] = {}  # to be written
        self._published: set[ModelRuntime] = set()
        self._trying = False

    def knows_end_of(self, operation_id: str) -> bool:
        """It is over, though it is open in the journal still."""
        return operation_id in self._outcomes

    async def finish(self, operation: Operation, publishes: ModelRuntime | None = None) -> None:
        """The outcome, and what is published now of the model given, in one transaction."""
        try:
            await self._journal.finish(operation, publishes.published if publishes else None)
        except JournalError as error:
            log.error("the outcome of %s could not be written yet: %s", operation.id, error)
            self._outcomes[operation.id] = operation
            self._later(publishes)

    async def publish(self, runtime: ModelRuntime) -> None:
        """What is published now."""
        try:
            await self._journal.publish(runtime.published)
        except JournalError as error:
            log.error("how %s is could not be written yet: %s", runtime.config.name, error)
            self._later(runtime)

    def _later(self, runtime: ModelRuntime | None) -> None:
        if runtime is not None:
            self._published.add(runtime)
        if not self._trying:
            self._trying = True
            self._spawn(self._until_written())

    async def _until_written(self) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while self._outcomes or self._published:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                with contextlib.suppress(JournalError):
                    await self._write()
        finally:
            self._trying = False

    async def _write(self) -> None:
        """Outcomes last: of an operation that is open the next start asks the ranks, which know no holds."""
        for runtime in list(self._published):
            if not runtime.deleting:  # nothing is to be left of it
                await self._journal.publish(runtime.published)
            self._published.discard(runtime)
        for operation in list(self._outcomes.values()):
            await self._journal.finish(operation, None)
            del self._outcomes[operation.id]
