"""The inference side of the leader rank: requests in through the gate, events out to the front ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from torpor.actors.engine.protocol import Engine, InvalidPrompt, PromptTooLong
from torpor.actors.messages import (
    AbortOrder,
    Admission,
    AdmissionReply,
    FinishReason,
    GateReason,
    GenerateRequest,
    TokenEvent,
)
from torpor.actors.ports import QueueFull
from torpor.actors.rank.front_ends import DuplicateRequest, FrontEnds
from torpor.actors.rank.gate import Gate, GateFull
from torpor.actors.rank.line import Line
from torpor.actors.rank.request_spans import RequestSpans

ORDER_S = 1.0  # for a front end to answer an order; one that has died is waited for no longer


class Leader:
    """A LeaderPort over a gate, the front ends' streams and an engine, which comes with `attach`."""

    def __init__(self, gate: Gate, front_ends: FrontEnds) -> None:
        self.gate = gate
        self.front_ends = front_ends
        self._engine: Engine | None = None
        self._spans = RequestSpans()
        self._line = (
            Line()
        )  # preparing takes longer for some than for others; who came first is admitted first

    def attach(self, engine: Engine) -> None:
        self._engine = engine

    # --- LeaderPort ---

    async def submit(self, front_end: str, requests: Sequence[GenerateRequest]) -> list[AdmissionReply]:
        return list(await asyncio.gather(*(self._submit(front_end, request) for request in requests)))

    async def cancel(self, front_end: str, request_ids: Sequence[str]) -> None:
        self._cancel_in_engine(self.front_ends.cancel(front_end, request_ids))

    async def abort_requests(self, front_end: str, request: str | None) -> int:
        """Also those that are on their way in: they end as soon as they are.

        Front ends that live have ended what waits there when this returns, so that it meets no later request.
        """
        found = self.front_ends.ids(request)
        self.front_ends.cancel_all(found)
        self._cancel_in_engine(found)
        answers = [asyncio.wrap_future(one) for one in self.front_ends.order_abort(front_end, request)]
        if not answers:
            return len(found)
        told, _ = await asyncio.wait(answers, timeout=ORDER_S)
        return len(found) + sum(answer.result() for answer in told)

    async def aborted(self, front_end: str, order: str, count: int) -> None:
        self.front_ends.aborted(front_end, order, count)

    def stream(self, front_end: str) -> AsyncIterator[list[TokenEvent | AbortOrder]]:
        return self.front_ends.stream(front_end)

    async def renew(self, front_end: str) -> None:
        self.front_ends.renew(front_end)

    async def detach(self, front_end: str) -> None:
        self._cancel_in_engine(self.front_ends.detach(front_end))

    # --- what the rank itself asks ---

    def sink(self, events: Sequence[TokenEvent]) -> None:
        """Where the engine's step thread puts its events. Never waits."""
        # First out of the gate: who reads that a request has ended may ask for an idle model at once.
        for event in events:
            if event.finish_reason is not None:
                self.gate.leave(event.request, event.finish_reason)
                self._spans.end(event)
        self.front_ends.deliver(events)

    def abort_running(self) -> None:
        """End every admitted request with what it has so far."""
        running = self.gate.admitted()
        self.front_ends.cancel_all(running)
        self._cancel_in_engine(running)

    def fail(self, error: str) -> None:
        """Close the gate for good; every request that runs ends with an error, none in silence (G3)."""
        self.gate.fail()
        running = self.gate.admitted()
        self.sink([TokenEvent(request, finish_reason=FinishReason.ERROR, error=error) for request in running])
        self._cancel_in_engine(running)

    def tick(self) -> None:
        """Look at the leases of drains and of front ends, and at freezes; to be called every second or so."""
        self.gate.tick()
        if self.gate.freeze_is_over():
            self.abort_running()
        self._cancel_in_engine(self.front_ends.expire())

    async def _submit(self, front_end: str, request: GenerateRequest) -> AdmissionReply:
        engine, closed = self._engine, self.gate.reason
        if engine is None or closed is not None:
            return AdmissionReply(request.id, Admission.CLOSED, closed or GateReason.LOADING)
        try:
            entry = self.front_ends.add(front_end, request.id, request.probe)
        except DuplicateRequest as error:
            return AdmissionReply(request.id, Admission.INVALID, detail=str(error))
        try:
            reply = await self._admit(engine, request)
        except BaseException:
            self.front_ends.remove(request.id)
            raise
        if reply.admission is not Admission.ADMITTED:
            self.front_ends.remove(request.id)
        elif entry.cancelled:
            # Whoever cancelled it while it came in may have asked an engine that did not know it yet.
            engine.cancel(request.id)
        return reply

    async def _admit(self, engine: Engine, request: GenerateRequest) -> AdmissionReply:
        place = self._line.join()
        try:
            prepared = await asyncio.to_thread(engine.prepare, request)
            await place.turn()
            return self._let_in(engine, request, prepared)
        except InvalidPrompt as error:
            why = Admission.TOO_LONG if isinstance(error, PromptTooLong) else Admission.INVALID
            return AdmissionReply(request.id, why, detail=str(error))
        finally:
            place.leave()

    def _let_in(self, engine: Engine, request: GenerateRequest, prepared: object) -> AdmissionReply:
        try:
            closed = self.gate.admit(request.id)
        except GateFull as error:
            return AdmissionReply(request.id, Admission.FULL, detail=str(error))
        if closed is not None:
            return AdmissionReply(request.id, Admission.CLOSED, closed)
        self._spans.begin(request)  # before its events can come
        try:
            engine.submit(prepared)
        except InvalidPrompt as error:
            refused = AdmissionReply(request.id, Admission.INVALID, detail=str(error))
        except QueueFull as error:
            refused = AdmissionReply(request.id, Admission.FULL, detail=str(error))
        except Exception as error:  # the step loop is dead
            refused = AdmissionReply(request.id, Admission.CLOSED, GateReason.FAILED, str(error))
        else:
            return AdmissionReply(request.id, Admission.ADMITTED)
        self._spans.drop(request.id)
        self.gate.leave(request.id, FinishReason.ERROR)
        return refused

    def _cancel_in_engine(self, requests: Iterable[str]) -> None:
        if self._engine is not None:
            for request in requests:
                self._engine.cancel(request)
