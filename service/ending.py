"""The end of a front end, in order: not ready, no new requests, what runs ends or is told, models parked."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from torpor.actors.messages import Kind, ModelState, OnConflict, OperationRequest, OperationState
from torpor.actors.ports import Control, ControlUnreachable

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOLD_S = 3.0  # who streams still is told that this ends, and has so long to hear it
PARKER = "a front end that ends"


@dataclass(frozen=True, slots=True)
class EndTimes:
    """notice_s: it serves on, and is not ready any more, until whoever sends requests knows. drain_s: what runs then
    may go on. park: models are put to sleep at last, within park_timeout_s; any request wakes them.
    """

    notice_s: float = 0.0
    drain_s: float = 5.0
    park: bool = False
    park_timeout_s: float = 60.0


class Stoppable(Protocol):
    """uvicorn's server: should_exit closes its sockets and waits for requests, force_exit does not wait."""

    should_exit: bool
    force_exit: bool


class Ending:
    """began: set with the first signal; whoever has no end of its own listens to it, such as GET /events."""

    def __init__(
        self,
        server: Stoppable,
        began: asyncio.Event,
        end_streams: Callable[[], Awaitable[None]],
        times: EndTimes,
    ) -> None:
        self._server = server
        self._began = began
        self._end_streams = end_streams
        self._times = times
        self._forcible = False  # by the next signal

    def on_signals(self) -> None:
        """From now on the first signal begins the end, and the second one does not wait for anybody."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self._forcible:
            self._server.force_exit = self._server.should_exit = True
        self._forcible = True
        self._began.set()

    def begin(self) -> None:
        """As the first signal does. One that comes then, such as of a supervisor that ends this too, is the first."""
        self._began.set()

    def now(self) -> None:
        """Without notice: there is nothing to serve."""
        self._server.should_exit = self._forcible = True
        self._began.set()

    async def run(self) -> None:
        await self._began.wait()
        if not self._server.should_exit:
            await asyncio.sleep(self._times.notice_s)
            self._server.should_exit = True
        await asyncio.sleep(self._times.drain_s)
        await self._end_streams()


async def park(control: Control, timeout_s: float, say: Callable[[str], None]) -> None:
    """Put every model that is awake to sleep, as it is configured, and tell what became of each."""

    async def one(model: str) -> None:
        wish = OperationRequest(
            Kind.SLEEP, model, on_conflict=OnConflict.WAIT, wake_on_request=True, caller=PARKER
        )
        operation = await control.wait((await control.submit(wish)).id)
        asleep = operation.state is OperationState.SUCCEEDED
        say(f"{model}: {'parked' if asleep else f'not parked: {operation.reason}'}")

    try:
        async with asyncio.timeout(timeout_s):
            awake = [view.name for view in await control.models() if view.state is ModelState.AWAKE]
            await asyncio.gather(*(one(model) for model in awake))
    except TimeoutError:
        say(f"not all models were parked within {timeout_s:g} s; those that were begun go on")
    except ControlUnreachable as error:
        say(f"no models were parked: {error}")
