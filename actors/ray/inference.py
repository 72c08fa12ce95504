"""Inference at a front end: one stream for each model's leader, shared by all requests of this front end."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from torpor.actors.messages import (
    AbortOrder,
    Admission,
    AdmissionReply,
    FinishReason,
    GateReason,
    GenerateRequest,
    ModelState,
    TokenEvent,
)
from torpor.actors.ports import (
    ContextTooLong,
    Control,
    EndWaiting,
    GateClosed,
    InvalidRequest,
    LeaderLost,
    QueueFull,
)
from torpor.actors.ray.calls import ActorGone, call, call_once, first_line
from torpor.actors.ray.inbox import Inbox
from torpor.actors.ray.lifeline import Cut, Lifeline
from torpor.actors.ray.lookup import Lookup
from torpor.actors.ray.names import rank_name
from torpor.actors.ray.submissions import Submissions

RENEW_S = 2.0
MAX_BATCHES_AHEAD = 32  # of a stream, before its producer waits
ENDING = "this front end is ending"
LEASE_S = 10.0  # a leader that answers no renewal for so long has forgotten us
SILENT_S = 5.0  # until one that was let in and says nothing, e.g. since it was frozen, is told of


class LeaderGone(Exception):
    """The leader died, or ended the stream, or cannot be reached. admitted: with this request let in."""

    def __init__(self, why: str, admitted: bool = False) -> None:
        super().__init__(why)
        self.admitted = admitted


def _nobody(request: str | None) -> int:
    return 0


class LeaderStream:
    """The connection to one leader: submits requests, sorts its events into inboxes, renews the lease."""

    def __init__(
        self, handle: ActorHandle, front_end: str, end_waiting: Callable[[str | None], int] = _nobody
    ) -> None:
        """end_waiting: of an order to abort; how many have waited."""
        self._handle = handle
        self._end_waiting = end_waiting
        self.front_end = front_end
        self._inboxes: dict[str, Inbox] = {}
        self._submissions = Submissions(self._send)
        self.lost = ""  # why this connection is over
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._renew())]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Admit, then events to the end. Raises what Inference.generate raises, and LeaderGone."""
        if request.id in self._inboxes:
            raise InvalidRequest(f"a request with the id {request.id!r} is still running; choose another id")
        inbox = self._inboxes[request.id] = Inbox()
        finished = admitted = False
        try:
            reply = await self._submissions.submit(request)
            finished = reply.admission is not Admission.ADMITTED
            raise_unless_admitted(reply)
            admitted = True
            while not finished:
                event = await inbox.get(SILENT_S if not inbox.begun else None)
                if event is None:
                    event = TokenEvent(request.id)
                finished = event.finish_reason is not None
                yield event
        except LeaderGone as error:
            if not inbox.begun:
                raise LeaderGone(str(error), admitted) from error
            finished = True
            yield TokenEvent(request.id, finish_reason=FinishReason.ERROR, error=str(error))
        finally:
            del self._inboxes[request.id]
            if not finished:  # the reader went away (G4), or nobody knows what became of it
                with contextlib.suppress(Exception):  # no connection: the lease ends it
                    self._handle.cancel.remote(self.front_end, [request.id])

    async def abort_requests(self, request: str | None) -> int:
        """As Inference.abort_requests. Raises LeaderGone."""
        try:
            return int(await call(self._handle, "abort_requests", self.front_end, request))
        except (ActorGone, RayError, OSError) as error:
            raise LeaderGone(first_line(error)) from error

    async def close(self, why: str = ENDING) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.lost = self.lost or why
        self._lose("")
        with contextlib.suppress(Exception):  # no connection: the lease ends it
            self._handle.detach.remote(self.front_end)

    async def _send(self, requests: Sequence[GenerateRequest]) -> list[AdmissionReply]:
        try:
            asked = call_once(self._handle, "submit", self.front_end, list(requests))
            return cast("list[AdmissionReply]", await asked)
        except ActorGone as error:
            raise LeaderGone(f"the model's leader is gone: {error}") from error
        except (RayError, OSError) as error:
            raise LeaderGone(f"the model's leader cannot be reached: {first_line(error)}") from error

    async def _pump(self) -> None:
        why = "it ended the stream of this front end"
        try:
            ahead = {"_generator_backpressure_num_objects": MAX_BATCHES_AHEAD}
            async for reference in self._handle.stream.options(**ahead).remote(self.front_end):
                batch: list[TokenEvent | AbortOrder] = await reference
                for event in batch:
                    if isinstance(event, AbortOrder):
                        count = self._end_waiting(event.request)
                        self._handle.aborted.remote(self.front_end, event.id, count)
                    elif event.request in self._inboxes:
                        self._inboxes[event.request].put(event)
        except Exception as error:  # whatever has ended it: nobody must wait for events that do not come (G3)
            why = first_line(error)
        self._lose(why)

    async def _renew(self) -> None:
        while not self.lost:
            try:
                await asyncio.wait_for(call(self._handle, "renew", self.front_end), LEASE_S)
            except TimeoutError:
                self._lose(f"it did not answer for {LEASE_S:g} s")
            except Exception as error:
                self._lose(first_line(error))
            await asyncio.sleep(RENEW_S)

    def _lose(self, why: str) -> None:
        self.lost = self.lost or f"the model's leader is gone: {why}"
        # A connection that is lost does not always say so to each call.
        self._submissions.end(LeaderGone(self.lost))
        for inbox in self._inboxes.values():
            inbox.lose(LeaderGone(self.lost))


class RayInference:
    """An InferenceAtLeaders. All its use is in one event loop."""

    def __init__(
        self, namespace: str, control: Control, find: Callable[[str], ActorHandle] | None = None
    ) -> None:
        self._control = control
        self._lookup = Lookup(find or (lambda model: ray.get_actor(rank_name(model, 0), namespace)))
        self._front_end = f"front-{uuid.uuid4().hex[:12]}"
        self._streams: dict[str, LeaderStream] = {}
        self._made = 0
        self._end_waiting: EndWaiting = lambda model, request: 0
        self._line = Lifeline()
        self._closing: set[asyncio.Task[None]] = set()

    async def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        self._check_open()
        stream = await self._stream(model)
        try:
            async with contextlib.aclosing(stream.generate(request)) as events:
                async for event in events:
                    yield event
        except LeaderGone as error:
            self._check_open()
            raise LeaderLost(str(error), error.admitted) from error

    async def abort_requests(self, model: str, request: str | None) -> int:
        try:
            stream = await self._stream(model)
            return await stream.abort_requests(request)
        except (GateClosed, LeaderGone):
            return 0  # nobody is inside

    def on_abort(self, end: EndWaiting) -> None:
        self._end_waiting = end

    def connections(self) -> tuple[LeaderStream, ...]:
        """To the leaders that were asked so far."""
        return tuple(self._streams.values())

    async def meet(self, models: Iterable[str]) -> None:
        """Connect to their leaders before somebody asks: that needs Ray's head, and what is said afterwards does not."""
        await asyncio.gather(*map(self._stream, models), return_exceptions=True)

    async def close(self, why: str = ENDING) -> None:
        """Whoever asks, or has not heard anything yet, is told why; who has, gets an error event."""
        self._line.cut(why)
        streams, self._streams = list(self._streams.values()), {}
        await asyncio.gather(*(stream.close(why) for stream in streams), *self._closing)

    def _check_open(self) -> None:
        if self._line.cut_for:
            raise GateClosed("ending", self._line.cut_for)

    async def _stream(self, model: str) -> LeaderStream:
        stream = self._streams.get(model)
        if stream is not None and not stream.lost:
            return stream
        try:
            handle = await self._line.hold(self._lookup.of(model))
        except Cut as error:
            raise GateClosed("ending", str(error)) from error
        except (RayError, OSError, RuntimeError) as error:
            raise LeaderLost(f"Ray cannot be reached: {first_line(error)}", admitted=False) from error
        except ValueError:
            view = await self._control.model(model)  # KeyError: no such model
            # Without a leader a model is on its way, or lost, whether or not that was noticed yet.
            coming = view.state in (ModelState.LOADING, ModelState.RECOVERING)
            raise GateClosed(GateReason(view.state) if coming else GateReason.FAILED, view.error) from None
        self._check_open()
        if (meanwhile := self._streams.get(model)) is not stream and meanwhile is not None:
            return meanwhile  # whoever waited before this one has made it
        self._made += 1
        # Each connection is a front end of its own: nothing of a lost one can come back through the next.
        fresh = self._streams[model] = LeaderStream(
            handle, f"{self._front_end}-{self._made}", lambda request: self._end_waiting(model, request)
        )
        if stream is not None:
            # Not awaited: who comes later must not overtake this request.
            closing = asyncio.create_task(stream.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return fresh


def raise_unless_admitted(reply: AdmissionReply) -> None:
    """Turn a refusal into its exception."""
    match reply.admission:
        case Admission.CLOSED:
            raise GateClosed(reply.gate_reason or GateReason.FAILED, reply.detail)
        case Admission.INVALID:
            raise InvalidRequest(reply.detail)
        case Admission.TOO_LONG:
            raise ContextTooLong(reply.detail)
        case Admission.FULL:
            raise QueueFull(reply.detail)
        case Admission.ADMITTED:
            return
