"""`with client.asleep(…)`: a model asleep for the length of a block, by a hold whose lease this process keeps alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torpor.service.client.errors import ClientError, NotFound, Rejected

DEFAULT_LEASE_S = 30.0
RENEWALS = 3  # in the length of a lease


@dataclass(slots=True)
class Freed:
    """What a model gave back. bytes: by device. lost: why the hold has ended meanwhile, or empty."""

    operation: Mapping[str, Any]
    bytes: Mapping[str, int]
    lost: str = ""

    @staticmethod
    def by(operation: Mapping[str, Any]) -> Freed:
        """operation: the record of the finished sleep."""
        freed: dict[str, int] = {}
        for rank in operation["ranks"]:
            freed[rank["device"]] = freed.get(rank["device"], 0) + int(rank["freed_bytes"])
        return Freed(operation, freed)

    def note(self, error: ClientError) -> None:
        """A renewal failed. An answer of the service is final; silence or trouble there may pass."""
        if isinstance(error, Rejected | NotFound):
            self.lost = str(error)


class LeaseThread:
    """Renews in a thread of its own, so that a long computation in the block does no harm; dies with the process."""

    def __init__(self, freed: Freed, lease_s: float, renew: Callable[[], object]) -> None:
        self._freed = freed
        self._pause_s = lease_s / RENEWALS
        self._renew = renew
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="torpor-lease", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(self._pause_s) and not self._freed.lost:
            try:
                self._renew()
            except ClientError as error:
                self._freed.note(error)


async def keep_lease(freed: Freed, lease_s: float, renew: Callable[[], Awaitable[object]]) -> None:
    """The same as a task, until it is cancelled."""
    while not freed.lost:
        await asyncio.sleep(lease_s / RENEWALS)
        try:
            await renew()
        except ClientError as error:
            freed.note(error)
