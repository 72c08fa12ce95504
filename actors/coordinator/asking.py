"""Questions to ranks outside of operations: how one is, and what it can spare. They are answered in any case."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.messages import RankStatus, Trimmed
from torpor.actors.ports import RankPort, RankUnreachable

TRIM_S = 30.0  # it waits for a stage that runs
STATUS_S = 2.0  # how long a listing waits for a rank


async def trim_ranks(
    runtime: ModelRuntime, target_bytes: int, ranks: Collection[int] | None = None
) -> list[Trimmed]:
    """Of these ranks at once, or of all; afterwards it is known what they still keep."""

    async def trim(port: RankPort) -> Trimmed:
        try:
            async with asyncio.timeout(TRIM_S):
                freed_bytes = await port.trim(target_bytes)
        except TimeoutError:
            return Trimmed(port.rank, error=f"no answer within {TRIM_S:g} s")
        except Exception as error:
            return Trimmed(port.rank, error=f"{type(error).__name__}: {error}")
        await ask_status(runtime, port)
        return Trimmed(port.rank, freed_bytes)

    asked = [port for port in runtime.ports if ranks is None or port.rank in ranks]
    return list(await asyncio.gather(*map(trim, asked)))


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
