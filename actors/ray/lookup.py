"""Finding actors by name, away from the event loop: Ray asks its head, and asks a dead one for a minute."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from ray.actor import ActorHandle

ANSWER_S = 5.0


class HeadSilent(OSError):
    """Ray's head has not answered in time."""


class Lookup:
    """Usable from any event loop. Who asks for a name that is being asked for waits for the same answer."""

    def __init__(self, find: Callable[[str], ActorHandle]) -> None:
        """find: as `ray.get_actor`, which blocks."""
        self._find = find
        self._asking: dict[str, Future[ActorHandle]] = {}

    async def of(self, name: str) -> ActorHandle:
        """Raises HeadSilent, and what `find` raises: ValueError where nobody has the name."""
        asked = self._asking.get(name)
        if asked is None or asked.done():
            asked = self._asking[name] = self._ask(name)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.wrap_future(asked)
        except TimeoutError:
            raise HeadSilent(f"Ray's head has not answered for {ANSWER_S:g} s") from None

    def _ask(self, name: str) -> Future[ActorHandle]:
        answer: Future[ActorHandle] = Future()
        answer.set_running_or_notify_cancel()  # who gives up waiting takes it from nobody else

        def ask() -> None:
            try:
                answer.set_result(self._find(name))
            except BaseException as error:
                answer.set_exception(error)

        # No pool's thread: those are waited for when the process ends.
        threading.Thread(target=ask, name=f"find {name}", daemon=True).start()
        return answer
