"""What the coordinator does about its models by itself: leases end, the idle fall asleep, and give room to others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from torpor.actors.coordinator.feed import Feed
from torpor.actors.coordinator.idle import IdleWatch
from torpor.actors.coordinator.leases import Leases
from torpor.actors.coordinator.room import Room
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.coordinator.usage import AskStatus, Usage
from torpor.actors.coordinator.writer import Writer
from torpor.actors.messages import Operation, OperationRequest


class Care:
    """carry_out: submits an operation and awaits its end. spawn: runs work in the background.

    ready: makes a model ready for its next sleep, where it is awake (ahead.py).
    """

    def __init__(
        self,
        models: Mapping[str, ModelRuntime],
        writer: Writer,
        feed: Feed,
        now: Callable[[], float],
        *,
        status: AskStatus,
        carry_out: Callable[[OperationRequest], Awaitable[Operation]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        ready: Callable[[ModelRuntime], None],
    ) -> None:
        self._ready = ready
        self._usage = Usage(status)
        self._idle = IdleWatch(models, self._usage, carry_out, spawn)
        self.leases = Leases(models, writer, feed, now, carry_out, spawn)
        self.room = Room(models, self._usage, carry_out)

    def look(self, runtime: ModelRuntime) -> None:
        """Its state may have changed: time begins or ends for its leases and its idleness; its next sleep is prepared."""
        self.leases.look(runtime)
        self._usage.look(runtime)
        self._idle.look(runtime)
        self._ready(runtime)
