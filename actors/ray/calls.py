"""One call of an actor's method, with Ray's errors sorted into gone, unknown and raised."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

RETRY_S = 0.1


class ActorGone(Exception):
    """The actor's process is gone and will not come back."""


class ActorSilent(ActorGone):
    """The actor cannot be reached for now: whether the call has run is unknown."""


async def call(handle: ActorHandle, method: str, *arguments: Any) -> Any:
    """Await one method. An actor that is unavailable for now (it restarts, the network is slow) is asked again.

    That is right for methods that may be repeated only. Without end: the caller has the deadline. Raises ActorGone,
    and what the method itself raised.
    """
    while True:
        try:
            return await call_once(handle, method, *arguments)
        except ActorSilent:
            await asyncio.sleep(RETRY_S)


async def call_once(handle: ActorHandle, method: str, *arguments: Any) -> Any:
    """Await one method, for those that must not be repeated. ActorSilent (an ActorGone): it may have run, or not."""
    try:
        return await getattr(handle, method).remote(*arguments)
    except ActorUnavailableError as error:
        raise ActorSilent(first_line(error)) from error
    except RayActorError as error:
        raise ActorGone(first_line(error)) from error
    except RayTaskError as error:
        if error.cause is None:
            raise
        raise error.cause from None


def first_line(error: BaseException) -> str:
    """Ray's messages run over a page; people need the first line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
