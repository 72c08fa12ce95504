"""Carries out what one operation's machine asks for: calls to ranks, deadlines, the coordinator's steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from torpor.actors.config import Deadlines
from torpor.actors.coordinator.machine import Action, Machine
from torpor.actors.coordinator.spans import OperationSpans
from torpor.actors.coordinator.steps import (
    PHASE_OF,
    Cancel,
    Event,
    Expired,
    Failed,
    Gone,
    Replied,
    Settled,
    Step,
    Told,
)
from torpor.actors.messages import (
    Kind,
    OperationState,
    PhaseCall,
    PhaseReply,
    RankStatus,
    Refusal,
    RejectCode,
)
from torpor.actors.ports import RankPort, RankUnreachable

GRACE_S = 2.0  # for an answer to come in after the rank's own deadline
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


class OwnSteps(Protocol):
    """What the coordinator does itself in an operation. Each answers None, or why it was not to be."""

    async def reserve(self, machine: Machine) -> Refusal | None: ...

    async def take_locks(self, machine: Machine) -> Refusal | None: ...

    async def write_decision(self, machine: Machine) -> Refusal | None: ...


class Driver:
    """One operation from its machine's first action to its last. on_step is told every step that begins."""

    def __init__(
        self,
        machine: Machine,
        ports: Sequence[RankPort],
        own: OwnSteps,
        deadlines: Deadlines,
        on_step: Callable[[Step], None],
        spans: OperationSpans,
    ) -> None:
        self.machine = machine
        self._ports = ports
        self._own = own
        self._deadlines = deadlines
        self._on_step = on_step
        self._spans = spans
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._epoch = machine.gathering.epoch
        self._drained = False
        self._rank_stage_s = 0.0
        self._ends_at = float("inf")  # of preflight to stage, as the caller wants it

    async def run(self, begin: Step = Step.PREFLIGHT, statuses: Sequence[RankStatus] = ()) -> None:
        """Until the machine is done. When cancelled it calls nobody: what is left is for the next start."""
        timeout_s = self.machine.request.timeout_s
        if timeout_s is not None:
            self._ends_at = self._now() + timeout_s
        try:
            self._perform(self.machine.begin(begin, statuses))
            while not self.machine.done:
                self._perform(self.machine.handle(await self._events.get()))
        finally:
            self._stop_timer()
            leftover = list(self._tasks)
            for task in leftover:
                task.cancel()
            await asyncio.gather(*leftover, return_exceptions=True)

    def cancel(self) -> bool:
        """True when the machine will end it; False when it is decided, or ending anyhow."""
        if not self.machine.cancellable:
            return False
        # At once, not through the queue: a decision must not slip in between.
        self._perform(self.machine.handle(Cancel()))
        return True

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _perform(self, actions: tuple[Action, ...]) -> None:
        if not actions:
            return
        step = self.machine.step
        self._on_step(step)
        self._stop_timer()
        self._drained = self._drained or step is Step.DRAIN
        if step is Step.DONE:
            self._events.put_nowait(Cancel())  # wakes `run`, which sees that it is done
            return
        limit_s = self._limit_s(step)
        if limit_s is not None:
            self._timer = asyncio.get_running_loop().call_later(
                limit_s, self._events.put_nowait, Expired(step)
            )
        for action in actions:
            self._act(action, step)

    def _act(self, action: Action, step: Step) -> None:
        own = {
            Action.RESERVE: self._own.reserve,
            Action.TAKE_LOCKS: self._own.take_locks,
            Action.WRITE_DECISION: self._own.write_decision,
        }
        if action in own:
            self._spawn(self._settle(step, own[action](self.machine)))
            return
        for rank in self.machine.gathering.pending():
            if action is Action.ASK_STATUS:
                self._spawn(self._ask(step, rank))
            elif action in (Action.CALL_COMMIT, Action.CALL_PUBLISH, Action.CALL_ABORT):
                self._spawn(self._insist(step, rank, action))
            else:
                self._spawn(self._once(step, rank, action))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, step: Step, work: Awaitable[Refusal | None]) -> None:
        try:
            refusal = await work
        except Exception as error:
            refusal = Refusal(RejectCode.REFUSED, f"{step}: {_text(error)}")
        self._events.put_nowait(Settled(step, refusal))

    async def _ask(self, step: Step, rank: int) -> None:
        event: Event
        try:
            with self._spans.call(rank, Action.ASK_STATUS) as call:
                event = Told(step, rank, call.heard(await self._ports[rank].status()))
        except RankUnreachable as error:
            event = Gone(step, rank, str(error))
        except Exception as error:
            event = Failed(step, rank, _text(error))
        self._events.put_nowait(event)

    async def _once(self, step: Step, rank: int, action: Action) -> None:
        self._events.put_nowait(await self._hear(step, rank, action))

    async def _insist(self, step: Step, rank: int, action: Action) -> None:
        """Call until the rank has said yes or the step is over. A time-out is unknown: ask what happened."""
        pause_s = FIRST_PAUSE_S
        attempt_s = self._deadlines.commit_s / 3
        while self.machine.step is step and not self.machine.gathering.answered(rank):
            try:
                async with asyncio.timeout(attempt_s):
                    event = await self._hear(step, rank, action)
                self._events.put_nowait(event)
            except TimeoutError:
                self._spawn(self._ask(step, rank))
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _hear(self, step: Step, rank: int, action: Action) -> Event:
        try:
            with self._spans.call(rank, action) as call:
                answer = await self._call(action, step, rank, call.traceparent)
                return Replied(step, rank, call.heard(answer))
        except RankUnreachable as error:
            return Gone(step, rank, str(error))
        except Exception as error:
            return Failed(step, rank, _text(error))

    def _call(self, action: Action, step: Step, rank: int, traceparent: str) -> Awaitable[PhaseReply]:
        port = self._ports[rank]
        call = PhaseCall(self.machine.operation, PHASE_OF[step], self._epoch, traceparent)
        request = self.machine.request
        match action:
            case Action.CALL_PREFLIGHT:
                return port.preflight(call, request)
            case Action.CALL_DRAIN:
                return port.drain(call, request.drain, self._drain_s(), self._lease_s())
            case Action.CALL_STAGE:
                return port.stage(call, self._rank_stage_s)
            case Action.CALL_COMMIT:
                return port.commit(call)
            case Action.CALL_PUBLISH:
                return port.publish(call)
            case Action.CALL_ABORT:
                # A model that is lost must not be let in again, not even until someone else closes its gate.
                return port.abort(call, self.machine.verdict is OperationState.FAILED)
            case _:
                raise AssertionError(f"{action} calls no rank")

    def _limit_s(self, step: Step) -> float | None:
        """None: the step is short and the coordinator's own."""
        deadlines = self._deadlines
        match step:
            case Step.PREFLIGHT:
                return self._capped(deadlines.preflight_s)
            case Step.DRAIN:
                return self._drain_s() + GRACE_S
            case Step.LOCK:
                return self._capped(deadlines.stage_s)
            case Step.STAGE:
                self._rank_stage_s = self._stage_s()  # of the largest plan: once for all ranks
                return self._rank_stage_s + GRACE_S
            case Step.DOUBT:
                return GRACE_S
            case Step.WITHDRAW:
                # Plans alone end by themselves; a gate that was drained is worth some patience.
                return deadlines.commit_s if self._drained else GRACE_S
            case Step.COMMIT if self.machine.request.kind is Kind.UPDATE:
                return deadlines.commit_s + self._weights_bytes() / deadlines.stage_bytes_per_s
            case Step.COMMIT | Step.PUBLISH | Step.OPEN | Step.ABORT | Step.REOPEN:
                return deadlines.commit_s
            case _:
                return None

    def _capped(self, seconds: float) -> float:
        return max(0.0, min(seconds, self._ends_at - self._now()))

    def _drain_s(self) -> float:
        asked_s = self.machine.request.drain.timeout_s
        return self._capped(self._deadlines.drain_s if asked_s is None else asked_s)

    def _lease_s(self) -> float:
        """Longer than all deadlines from here to the end of an abort: a follower may be staged until then."""
        deadlines = self._deadlines
        return self._drain_s() + deadlines.stage_s + self._stage_s() + 2 * deadlines.commit_s + 4 * GRACE_S

    def _stage_s(self) -> float:
        plans = [slot.plan for slot in self.machine.slots if slot.plan is not None]
        moved = max(
            (max(p.kept_bytes + p.device_bytes + p.reload_bytes, p.host_bytes) for p in plans), default=0
        )
        return self._capped(self._deadlines.stage_s + moved / self._deadlines.stage_bytes_per_s)

    def _weights_bytes(self) -> int:
        """That one rank has to write; also known where an earlier coordinator has made the plans."""
        rows = [
            sum(
                int(str(row.get("device_bytes") or 0))
                for row in slot.status.memory
                if row.get("tag") == "weights"
            )
            for slot in self.machine.slots
            if slot.status is not None
        ]
        return max(rows, default=0)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
