"""Inference with patience: keeps each request until its first token, whatever becomes of gate and leader (G3)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from torpor.actors.generation import is_meant
from torpor.actors.messages import FinishReason, GenerateRequest, TokenEvent
from torpor.actors.ports import Control, GateClosed, InferenceAtLeaders, LeaderLost
from torpor.service.gate.door import Door, QueueCounts, Visitor
from torpor.service.gate.gates import Gates
from torpor.service.gate.keeper import ENDING, Keeper
from torpor.service.gate.policy import POLICIES, Answer, WhenClosed
from torpor.service.gate.pulse import Pulse


class PatientInference:
    """An Inference over another one. Requests that may wait do so here, at the front end, in order."""

    def __init__(
        self, inner: InferenceAtLeaders, control: Control, gates: Gates, counts: QueueCounts
    ) -> None:
        self._inner = inner
        self._gates = gates
        self._counts = counts
        self._keeper = Keeper(control)
        self._doors: dict[str, Door] = {}
        self._attempts: set[_Attempts] = set()
        self.pulse = Pulse()
        inner.on_abort(self._end_waiting)

    async def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """As Inference.generate. A request that was lost before its first token is submitted once more.

        Not so a probe: it waits for nobody, and nobody is woken for it.
        """
        if request.probe:
            async with aclosing(_events(self._inner.generate(model, request))) as events:
                async for event in events:
                    yield event
            return
        door = await self._door(model)
        attempts = _Attempts(request, door, door.arrive())
        self._attempts.add(attempts)
        try:
            async with aclosing(self._tried(attempts, door)) as events:
                async for event in events:
                    yield event if event.request == request.id else replace(event, request=request.id)
        except Aborted:
            yield TokenEvent(request.id, finish_reason=FinishReason.ABORT)
        finally:
            self._attempts.discard(attempts)
            door.left(attempts.visitor)

    async def _tried(self, attempts: _Attempts, door: Door) -> AsyncGenerator[TokenEvent, None]:
        begun = ended = False  # it has said something; all that it has to say
        while not ended:
            await attempts.turn()
            events = self._inner.generate(door.model, attempts.asked)
            lost = False
            try:
                async for event in events:
                    if not begun and attempts.is_lost(event):
                        lost = True
                        break
                    if not attempts.inside:
                        attempts.enter()
                    begun = begun or not event.silent
                    if event.token_ids:
                        self.pulse.beat(door.model)
                    yield event
                ended = not lost
            except LeaderLost as gone:
                attempts.lost(gone)
            except GateClosed as closed:
                attempts.refused(closed)
            except KeyError:
                if not door.occupied:
                    self._doors.pop(door.model, None)  # no such model: names are not to be collected
                raise
            finally:
                await _close(events)

    async def abort_requests(self, model: str, request: str | None) -> int:
        """Here those that wait, at the leader all others."""
        return self._end_waiting(model, request) + await self._inner.abort_requests(model, request)

    def _end_waiting(self, model: str, request: str | None) -> int:
        return sum(one.abort() for one in list(self._attempts) if one.is_of(model, request))

    async def close(self, why: str = ENDING) -> None:
        """Who waits is refused with it, who runs is told by the Inference below."""
        await self._keeper.close(why)
        await self._gates.close()
        close = getattr(self._inner, "close", None)
        if close is not None:
            await close(why)

    async def _door(self, model: str) -> Door:
        """An empty one takes the configuration of by now."""
        door = self._doors.get(model)
        if door is None or not door.occupied:
            config = await self._gates.of(model)
            if door is None or (door.config != config and not door.occupied):
                door = self._doors[model] = Door(model, config, self._counts, self._keeper.keep)
        return door


class Aborted(Exception):
    """Somebody has asked that this request end, before it was let in."""


class _Attempts:
    """One request's: when it may try, with which id, and whether it may again."""

    def __init__(self, request: GenerateRequest, door: Door, visitor: Visitor) -> None:
        self.asked = request
        self.visitor = visitor
        self._request = request
        self.door = door
        self._policy = POLICIES[WhenClosed(door.config.when_closed)]
        self._tries = 0
        self._was_lost = False
        self._reason = ""  # why it has to wait now
        self.inside = False  # known at the leader, where it can be aborted
        self._aborted = False

    def is_of(self, model: str, request: str | None) -> bool:
        return self.door.model == model and is_meant(self._request.id, request)

    def abort(self) -> bool:
        """Whether it waits here. One that is on its way in ends by itself, or at the leader."""
        if self.inside or self._aborted:
            return False
        self._aborted = True
        return self.door.turn_away(self.visitor, Aborted())

    def enter(self) -> None:
        """Raises Aborted where it came to that meanwhile."""
        self._check()
        self.inside = True
        self.door.entered(self.visitor)

    def _check(self) -> None:
        if self._aborted:
            raise Aborted

    async def turn(self) -> None:
        self.inside = False
        self._check()
        if self._reason or self.door.busy:
            reason, self._reason = self._reason, ""
            await self.door.wait(self.visitor, reason)
            self._check()

    def refused(self, closed: GateClosed) -> None:
        """At the gate. Raises it again unless the policy lets it wait."""
        if self._policy.get(str(closed.reason), Answer.REFUSE) is Answer.REFUSE:
            raise closed
        self._reason = str(closed.reason)

    def lost(self, lost: LeaderLost) -> None:
        """Before its first token. Once it may have begun, it is submitted once more and not again."""
        if self._was_lost and (lost.admitted or not self._policy):
            raise lost
        self._was_lost = self._was_lost or lost.admitted or not self._policy
        self._tries += 1
        # Under another id: the lost one may be known at the leader for a while.
        self.asked = replace(self._request, id=f"{self._request.id}~{self._tries}")
        self._reason = str(lost.reason) if self._policy else ""

    def is_lost(self, first: TokenEvent) -> bool:
        """The model failed under it before it said anything; the second time, that is its answer."""
        failed = first.finish_reason is FinishReason.ERROR and not first.text and not first.token_ids
        if not failed or self._was_lost:
            return False
        self.lost(LeaderLost(first.error, admitted=True))
        return True


async def _events(events: AsyncIterator[TokenEvent]) -> AsyncGenerator[TokenEvent, None]:
    try:
        async for event in events:
            yield event
    finally:
        await _close(events)


async def _close(events: AsyncIterator[TokenEvent]) -> None:
    aclose = getattr(events, "aclose", None)
    if aclose is not None:
        await aclose()
