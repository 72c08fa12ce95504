"""Sees to it that those who wait at a model's door are let in or refused: one task a door, while anybody waits."""

from __future__ import annotations

import asyncio

from torpor.actors.messages import (
    Kind,
    MakeRoom,
    ModelView,
    OnConflict,
    OperationRequest,
    OperationState,
    Origin,
    RejectCode,
)
from torpor.actors.ports import Control, ControlUnreachable, GateClosed
from torpor.service.gate.door import Door
from torpor.service.gate.policy import Answer, WhenClosed, answer, refused

LOOK_S = 2.0  # the longest single look: a coordinator that has died is noticed
RETRY_S = 0.5  # while there is no coordinator, or no memory yet
LONGEST_RETRY_S = 4.0
SHORTEST_RETRY_S = 0.05
TRIES = 4  # at least so many in the time of each request: pauses have grown before a late one comes
ENDING = "this front end is ending"
FAILED_PATIENCE_S = 5.0  # for a failed model to begin to recover


class Keeper:
    """Many requests, one wake: whoever waits shares it, here and at other front ends."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._tasks: dict[Door, asyncio.Task[None]] = {}
        self._why = ENDING  # nobody is let in any more

    def keep(self, door: Door) -> None:
        """To be called when somebody begins to wait."""
        task = self._tasks.get(door)
        if task is None or task.done():
            self._tasks[door] = asyncio.get_running_loop().create_task(self._keep(door))

    async def close(self, why: str = ENDING) -> None:
        """Whoever waits is refused with it."""
        self._why = why
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, door: Door) -> None:
        try:
            while door.occupied:
                await self._once(door)
        except Exception as error:  # whatever it is, nobody waits for nothing (G3)
            door.refuse_all(error)
        finally:
            self._tasks.pop(door, None)
            door.refuse_all(GateClosed("ending", self._why))

    async def _once(self, door: Door) -> None:
        """From one look at a closed gate to its opening, or to a refusal."""
        seen: ModelView | None = None
        failed_since_s: float | None = None
        longest_s = min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, door.config.queue_timeout_s / TRIES))
        retry_s = min(RETRY_S, longest_s)
        loop = asyncio.get_running_loop()
        while door.occupied:
            try:
                seen = await self._control.watch(door.model, seen, LOOK_S)
            except ControlUnreachable:
                await asyncio.sleep(RETRY_S)
                continue
            if seen.gate_open:
                await asyncio.sleep(door.pause_s)
                door.release_all()
                return
            door.reason = str(seen.gate_reason)
            what = answer(WhenClosed(door.config.when_closed), seen)
            if what is Answer.WAIT_BRIEFLY:
                failed_since_s = loop.time() if failed_since_s is None else failed_since_s
                what = Answer.REFUSE if loop.time() - failed_since_s >= FAILED_PATIENCE_S else Answer.WAIT
            else:
                failed_since_s = None
            if what is Answer.REFUSE:
                door.refuse_all(refused(seen))
                return
            if what is Answer.WAKE:
                seen = None
                if not await self._wake(door):
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, longest_s)

    async def _wake(self, door: Door) -> bool:
        """False: to be tried again later. What cannot be waited out is told to everybody."""
        wish = OperationRequest(Kind.WAKE, door.model, on_conflict=OnConflict.WAIT, origin=Origin.REQUEST)
        try:
            operation = await self._control.wait((await self._control.submit(wish)).id)
        except (ControlUnreachable, KeyError):
            return False
        if operation.state is OperationState.FAILED:
            return True  # it may recover: that is seen at the next look
        door.detail = ""
        if operation.state is OperationState.SUCCEEDED or operation.code in (
            RejectCode.HELD,
            RejectCode.CONFLICT,
        ):
            return operation.code is not RejectCode.CONFLICT
        if operation.code is RejectCode.DEVICE_MEMORY and door.config.make_room == MakeRoom.IDLE:
            door.detail = f"no room for its wake: {operation.reason}"
            return False
        why = f"its wake {operation.id} was {operation.state}: {operation.reason}"
        door.refuse_all(GateClosed(door.reason, why))
        return True
