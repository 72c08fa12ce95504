"""Loads models; where their devices are full, idle neighbours give way, as they do to a wake (gate.make_room)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from torpor.actors.config import Deadlines
from torpor.actors.coordinator.asking import STATUS_S
from torpor.actors.coordinator.budget import Place
from torpor.actors.coordinator.room import Room
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.messages import MakeRoom, RankStatus
from torpor.actors.ports import NoDeviceMemory, RankMaker, RankPort

log = logging.getLogger(__name__)
Make = Callable[[], Awaitable[Sequence[RankPort]]]


class Loading:
    """What a model needs is known only when it has loaded: so it is tried, and tried again where there is more room."""

    def __init__(self, maker: RankMaker, room: Room, deadlines: Deadlines) -> None:
        self._maker = maker
        self._room = room
        self._load_s = deadlines.load_s
        self._attempts: dict[str, asyncio.Event] = {}  # by model; each is set when it is over
        self._crowded: set[str] = set()  # models whose last attempt was not the only one of its time
        self._turns: dict[Place, asyncio.Lock] = {}

    async def make_and_load(self, runtime: ModelRuntime, make: Make) -> Sequence[RankPort]:
        """The ranks, all loaded. Raises what kept them from it; some may be there still then.

        make: makes ranks that have loaded nothing yet. It is called again where their load found no memory and the
        model's policy lets idle neighbours give way: for these, and for busy ones to be idle, load_s is waited.
        """
        ports = await make()
        try:
            await self.load(runtime)
        except NoDeviceMemory as error:
            if MakeRoom(runtime.config.gate.make_room) is not MakeRoom.IDLE:
                raise
            places = await _places(ports)
            if not places:
                raise
            log.info("%s finds no room to load (%s) and waits for it", runtime.config.name, error)
            await self._maker.end(runtime.config)  # what they had loaded is in the way of others that load
            async with self._turn_at(places):
                return await self._load_with_room(runtime, make, error, places)
        return ports

    async def load(self, runtime: ModelRuntime) -> None:
        """What its ranks have not loaded yet. Raises TimeoutError, and as RankMaker.load."""
        model = runtime.config
        self._crowded.discard(model.name)
        if self._attempts:
            self._crowded |= {model.name, *self._attempts}
        over = self._attempts[model.name] = asyncio.Event()
        try:
            async with asyncio.timeout(self._load_s):
                await self._maker.load(model)
        finally:
            self._attempts.pop(model.name, None)
            over.set()

    async def _load_with_room(
        self, runtime: ModelRuntime, make: Make, error: NoDeviceMemory, places: frozenset[Place]
    ) -> Sequence[RankPort]:
        model, until_s = runtime.config, asyncio.get_running_loop().time() + self._load_s
        first = True
        while True:
            for over in list(self._attempts.values()):
                await over.wait()
            # Where another loaded at the same time, what that has left may be enough: at first nobody is to sleep for it.
            crowded = model.name in self._crowded
            if not (first and crowded):
                gave = await self._room.give_way(model.name, places, error.lacking_bytes, until_s)
                if not gave and not crowded:
                    raise error
            first = False
            ports = await make()
            try:
                await self.load(runtime)
            except NoDeviceMemory as again:
                if asyncio.get_running_loop().time() >= until_s:
                    raise
                places = await _places(ports) or places  # new ranks may sit elsewhere
                await self._maker.end(model)
                error = again
            else:
                return ports

    @contextlib.asynccontextmanager
    async def _turn_at(self, places: frozenset[Place]) -> AsyncIterator[None]:
        """One model at a time waits for room at a device: two would take it from each other for ever."""
        async with contextlib.AsyncExitStack() as turns:
            for place in sorted(places, key=lambda place: (place.node, place.device)):
                await turns.enter_async_context(self._turns.setdefault(place, asyncio.Lock()))
            yield


async def _places(ports: Sequence[RankPort]) -> frozenset[Place]:
    """Devices of ranks that have one, and answer."""

    async def ask(port: RankPort) -> RankStatus:
        async with asyncio.timeout(STATUS_S):
            return await port.status()

    statuses = await asyncio.gather(*map(ask, ports), return_exceptions=True)
    return frozenset(
        Place.of(status) for status in statuses if not isinstance(status, BaseException) and status.device_id
    )
