"""Makes device memory free for a model that wakes or loads: idle neighbours go to sleep, least recently used first."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping

from torpor.actors.coordinator.budget import Place
from torpor.actors.coordinator.idle import idle_sleep
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.coordinator.usage import Usage
from torpor.actors.messages import (
    Kind,
    MakeRoom,
    ModelState,
    Operation,
    OperationRequest,
    OperationState,
    Origin,
)

Lacking = Mapping[Place, int]  # bytes by device
LOOK_S = 1.0  # while those who could give way are busy
_NEVER_IDLE = (ModelState.ASLEEP, ModelState.FAILED)  # what these have left is not given back for others


def may_make_room(request: OperationRequest, runtime: ModelRuntime) -> bool:
    """A wake on request as the model is configured; one that somebody asks for only when asked to."""
    if request.kind is not Kind.WAKE or request.dry_run:
        return False
    wish = request.make_room
    if wish is None and request.origin is Origin.REQUEST:
        wish = MakeRoom(runtime.config.gate.make_room)
    return wish is MakeRoom.IDLE


class Room:
    """carry_out: submits an operation and awaits its end."""

    def __init__(
        self,
        models: Mapping[str, ModelRuntime],
        usage: Usage,
        carry_out: Callable[[OperationRequest], Awaitable[Operation]],
    ) -> None:
        self._models = models
        self._usage = usage
        self._carry_out = carry_out

    async def make(self, waking: str, lacking: Callable[[], Awaitable[Lacking]]) -> bool:
        """Until nothing is lacking (True), or nobody is left who could give what is: then nobody else is touched.

        lacking: what is, by now.
        """
        asked = {waking}
        while missing := await lacking():
            neighbours = await self._neighbours(asked, missing)
            if not _suffices(neighbours, missing):
                return False
            chosen = neighbours[0].config.name
            asked.add(chosen)
            await self._carry_out(idle_sleep(chosen, Origin.ROOM))
        return True

    async def give_way(
        self, loading: str, places: Collection[Place], size_bytes: int, until_s: float
    ) -> bool:
        """Until idle neighbours at these devices have given back so much, or nobody more can; busy ones are waited for.

        True where any has. until_s: in the event loop's time.
        """
        given_bytes, asked = 0, {loading}
        some = dict.fromkeys(places, 1)
        while given_bytes < max(1, size_bytes):
            near = [
                one
                for name, one in self._models.items()
                if name not in asked and _sits_at(one, places) and one.state() not in _NEVER_IDLE
            ]
            if neighbours := await self._neighbours(asked, some):
                chosen = neighbours[0]
                asked.add(chosen.config.name)
                had = chosen.bytes_by_place()
                operation = await self._carry_out(idle_sleep(chosen.config.name, Origin.ROOM))
                if operation.state is OperationState.SUCCEEDED:
                    given_bytes += sum(had[place] for place in places)
            elif given_bytes or not near or asyncio.get_running_loop().time() >= until_s:
                break
            else:
                await asyncio.sleep(LOOK_S)
        return given_bytes > 0

    async def _neighbours(self, but: set[str], missing: Lacking) -> list[ModelRuntime]:
        """Idle models with memory on the devices where some is missing, least recently used first."""
        near = [
            runtime
            for name, runtime in self._models.items()
            if name not in but and _has_any(runtime, missing)
        ]
        idle = await asyncio.gather(*(self._usage.free_to_sleep_s(runtime) for runtime in near))
        known = [
            (seconds, runtime) for seconds, runtime in zip(idle, near, strict=True) if seconds is not None
        ]
        return [runtime for _, runtime in sorted(known, key=lambda entry: -entry[0])]


def _suffices(neighbours: list[ModelRuntime], missing: Lacking) -> bool:
    theirs = sum((runtime.bytes_by_place() for runtime in neighbours), Counter[Place]())
    return bool(neighbours) and all(theirs[place] >= size for place, size in missing.items())


def _sits_at(runtime: ModelRuntime, places: Collection[Place]) -> bool:
    """Also one that is about to wake, and has told of no memory yet."""
    return any(Place.of(status) in places for status in runtime.statuses.values())


def _has_any(runtime: ModelRuntime, missing: Lacking) -> bool:
    has = runtime.bytes_by_place()
    return any(has[place] for place in missing)
