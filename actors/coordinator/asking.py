"""How one rank is, asked for people and for idleness: it is answered in any case."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.messages import RankStatus
from torpor.actors.ports import RankPort, RankUnreachable

STATUS_S = 2.0  # how long a listing waits for a rank


async def ask_status(runtime: ModelRuntime, port: RankPort) -> RankStatus:
    """As it tells; where it does not, as it was known last, with why. Ranks that still load are looked at alone."""
    try:
        async with asyncio.timeout(STATUS_S):
            status = await port.status()
    except TimeoutError:
        return runtime.unknown_status(port.rank, f"unknown: no answer within {STATUS_S:g} s")
    except RankUnreachable as error:
        return replace(runtime.unknown_status(port.rank, f"gone: {error}"), loaded=False)
    except Exception as error:
        return runtime.unknown_status(port.rank, f"unknown: {type(error).__name__}: {error}")
    if runtime.ports:
        runtime.statuses[port.rank] = status
    return status
