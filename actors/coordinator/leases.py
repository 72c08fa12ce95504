"""The leases of holds: renewed by whoever holds, and carried out at their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from torpor.actors.coordinator.feed import Feed
from torpor.actors.coordinator.holds import with_lease_until, without_lease
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.coordinator.writer import Writer
from torpor.actors.messages import (
    Hold,
    Kind,
    OnConflict,
    OnExpiry,
    Operation,
    OperationRequest,
    OperationState,
    Origin,
)
from torpor.actors.ports import ControlUnreachable, NoLease

log = logging.getLogger(__name__)
FIRST_PAUSE_S = 1.0  # after a wake that did not succeed
LONGEST_PAUSE_S = 60.0


class Leases:
    """Timers of all leased holds. A new coordinator begins them anew at their full length: nobody could renew them.

    carry_out: submits an operation and awaits its end. spawn: runs work in the background.
    """

    def __init__(
        self,
        models: Mapping[str, ModelRuntime],
        writer: Writer,
        feed: Feed,
        now: Callable[[], float],
        carry_out: Callable[[OperationRequest], Awaitable[Operation]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._models = models
        self._writer = writer
        self._feed = feed
        self._now = now
        self._carry_out = carry_out
        self._spawn = spawn
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by the hold's operation
        self._ended: set[str] = set()  # past their end, and not gone yet

    def look(self, runtime: ModelRuntime) -> None:
        """To be called when the model's published state has changed."""
        for hold in runtime.published.holds:
            known = hold.operation in self._timers or hold.operation in self._ended
            if hold.lease_s is not None and not known:
                self._begin(runtime, hold)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def renew(self, operation_id: str) -> Hold:
        """From now on it is good for its full length again. Raises NoLease."""
        for runtime in self._models.values():
            hold = _find(runtime, operation_id)
            if hold is not None and operation_id in self._timers:
                self._timers[operation_id].cancel()
                return self._begin(runtime, hold)
        raise NoLease(
            f"operation {operation_id} holds no lease any more: it has ended, or the model was woken; sleep anew"
        )

    def _begin(self, runtime: ModelRuntime, hold: Hold) -> Hold:
        assert hold.lease_s is not None
        begun = with_lease_until(hold, self._now() + hold.lease_s)
        # Not in the journal: after a restart leases begin anew anyhow.
        holds = tuple(begun if one.operation == hold.operation else one for one in runtime.published.holds)
        runtime.published = replace(runtime.published, holds=holds)
        loop = asyncio.get_running_loop()
        self._timers[hold.operation] = loop.call_later(hold.lease_s, self._over, runtime, hold.operation)
        return begun

    def _is_there(self, runtime: ModelRuntime) -> bool:
        """Not deleted; another model may have its name by now."""
        return self._models.get(runtime.config.name) is runtime

    def _over(self, runtime: ModelRuntime, operation_id: str) -> None:
        del self._timers[operation_id]
        if _find(runtime, operation_id) is not None:
            self._ended.add(operation_id)
            self._spawn(self._end(runtime, operation_id))

    async def _end(self, runtime: ModelRuntime, operation_id: str) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while self._is_there(runtime) and (hold := _find(runtime, operation_id)) is not None:
                if hold.on_expiry is OnExpiry.KEEP or len(runtime.published.holds) > 1:
                    await self._drop(runtime, operation_id)
                    return
                wake = OperationRequest(
                    Kind.WAKE,
                    runtime.config.name,
                    on_conflict=OnConflict.WAIT,
                    origin=Origin.LEASE,
                    caller=operation_id,
                )
                if await self._wake(wake):
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._ended.discard(operation_id)

    async def _wake(self, wake: OperationRequest) -> bool:
        """True when there is nothing left to do."""
        try:
            operation = await self._carry_out(wake)
        except ControlUnreachable as error:  # the journal cannot be written
            log.error("the lease of %s has ended, and %s cannot be woken: %s", wake.caller, wake.model, error)
            return False
        return operation.state is OperationState.SUCCEEDED

    async def _drop(self, runtime: ModelRuntime, operation_id: str) -> None:
        published = runtime.published
        runtime.published = published.changed(holds=without_lease(published.holds, operation_id))
        self._feed.add(model=runtime.view())
        await self._writer.publish(runtime)


def _find(runtime: ModelRuntime, operation_id: str) -> Hold | None:
    return next((hold for hold in runtime.published.holds if hold.operation == operation_id), None)
