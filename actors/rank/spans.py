"""What a rank does for a traced operation, as spans in the rank's own process."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torpor.actors.messages import PhaseCall, PhaseReply
from torpor.actors.tracing import begin


class Ranked(Protocol):
    rank: int


R = TypeVar("R", bound=Ranked)
P = ParamSpec("P")


def traced(
    method: Callable[Concatenate[R, PhaseCall, P], Awaitable[PhaseReply]],
) -> Callable[Concatenate[R, PhaseCall, P], Coroutine[Any, Any, PhaseReply]]:
    """A rank's answer to the coordinator, as a span beneath the call where that is part of a trace."""

    async def whole(self: R, call: PhaseCall, /, *arguments: P.args, **named: P.kwargs) -> PhaseReply:
        if not call.traceparent:
            return await method(self, call, *arguments, **named)
        mark = begin(
            f"torpor rank {method.__name__}",
            call.traceparent,
            attributes={"rank": self.rank, "operation": call.operation, "phase": str(call.phase)},
        )
        try:
            reply = await method(self, call, *arguments, **named)
            mark.tell(
                {
                    "outcome": "ok" if reply.ok else "refused",
                    "freed_bytes": reply.freed_bytes,
                    "kept_bytes": reply.kept_bytes,
                    "device_bytes": reply.device_bytes,
                }
            )
            if not reply.ok:
                mark.fail(str(reply.refusals[0].code) if reply.refusals else "refused")
            return reply
        except BaseException as error:
            mark.tell({"outcome": "failed"})
            mark.fail(type(error).__name__)
            raise
        finally:
            mark.end()

    functools.update_wrapper(whole, method)
    return whole
