"""The five phases on one rank: each message once, in turn, with its native work in a thread.

A phase that was answered is answered alike when it is asked again; one that runs is joined. Abort goes past the
queue: it ends a drain's wait and stops a stage, and then takes its turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    Kind,
    OperationRequest,
    Phase,
    PhaseCall,
    PhaseReply,
    Refusal,
    RejectCode,
)
from torpor.actors.rank.gate import Emptied, GateHeld, NotIdle
from torpor.actors.rank.leader import Leader
from torpor.actors.rank.machinery import Machinery
from torpor.actors.rank.replies import refusal_of
from torpor.actors.rank.transaction import Transaction, Transactions

DOUBT_S = (
    10.0  # a staged rank waits this long for a decision, beyond the stage's own deadline, before it says so
)

Work = Callable[[Transaction, PhaseCall], Awaitable[PhaseReply]]


class Phases:
    """The transaction side of a RankPort. All methods run in one event loop."""

    def __init__(
        self, machinery: Machinery, leader: Leader | None, rank: int, incarnation: str, epoch: int
    ) -> None:
        self._machinery = machinery
        self._leader = leader
        self._rank = rank
        self._incarnation = incarnation
        self._epoch = epoch
        self._transactions = Transactions()
        self._turn = asyncio.Lock()
        # The last operation with a preflight here: a late drain of one before must not overtake it.
        self._planned = ""

    @property
    def epoch(self) -> int:
        return self._epoch

    def hear(self, epoch: int) -> None:
        """A coordinator is there that has this epoch."""
        self._epoch = max(self._epoch, epoch)

    def staging(self) -> tuple[str | None, Kind | None]:
        """Operation and kind of the stage that runs or waits for its turn."""
        tx = self._transactions.staging()
        return (tx.operation, tx.request.kind if tx.request else None) if tx else (None, None)

    def staged_digest(self, operation: str | None) -> str:
        """As the stage of this operation has answered; empty while it has not."""
        return self._transactions.staged_digest(operation)

    async def preflight(self, call: PhaseCall, request: OperationRequest) -> PhaseReply:
        async def work(tx: Transaction, call: PhaseCall) -> PhaseReply:
            tx.request = request
            planned = await asyncio.to_thread(self._machinery.plan, call.operation, request)
            tx.plan, tx.reload = planned.plan, planned.reload
            self._planned = call.operation
            return self._reply(call, planned.refusals, **planned.numbers)

        return await self._once(call, work)

    async def drain(self, call: PhaseCall, spec: DrainSpec, timeout_s: float, lease_s: float) -> PhaseReply:
        async def work(tx: Transaction, call: PhaseCall) -> PhaseReply:
            if self._leader is None:
                return self._reply(call)
            if tx.said_yes(Phase.PREFLIGHT) and self._planned != call.operation:
                return self._refused(call, "another operation began here since; start this one again")
            noop = tx.said_yes(Phase.PREFLIGHT) and tx.changes_nothing
            if noop and spec.mode is not DrainMode.ABORT:
                return self._reply(call)  # whoever is inside need not stop for it (C1)
            return await self._drain(self._leader, call, spec, timeout_s, lease_s)

        # Not remembered: a drain that is asked for again closes again, and begins a new lease.
        return await self._once(call, work, in_turn=False, remember=False)

    async def stage(self, call: PhaseCall, timeout_s: float) -> PhaseReply:
        async def work(tx: Transaction, call: PhaseCall) -> PhaseReply:
            return await self._stage(tx, call, timeout_s)

        return await self._once(call, work)

    async def commit(self, call: PhaseCall) -> PhaseReply:
        # A commit that failed may be asked for again: the ledger goes on where it stopped.
        return await self._once(call, self._commit)

    async def publish(self, call: PhaseCall) -> PhaseReply:
        return await self._once(call, self._publish)

    async def abort(self, call: PhaseCall, lost: bool = False) -> PhaseReply:
        if (stale := self._check_epoch(call)) is not None:
            return stale
        if lost and self._leader is not None:
            self._leader.fail("another rank of this model is lost")  # first: no release below opens it then
        tx = self._transactions.get(call.operation)
        if not (tx.said_yes(Phase.COMMIT) or Phase.COMMIT in tx.running):
            tx.aborting = True
            if Phase.STAGE in tx.running:
                if tx.in_ledger:
                    self._machinery.stop()
            elif self._leader is not None and not tx.said_yes(Phase.STAGE):
                self._leader.gate.release(call.operation)
        # Its key among the replies is that of the phase it undoes: an abort has no phase word of its own.
        async with self._turn:
            stale = self._check_epoch(call)  # a new coordinator may have come, and have decided
            return stale if stale is not None else await self._abort(tx, call)

    # --- the work ---

    async def _drain(
        self, leader: Leader, call: PhaseCall, spec: DrainSpec, timeout_s: float, lease_s: float
    ) -> PhaseReply:
        gate = leader.gate
        try:
            emptied = gate.begin_drain(call.operation, spec.mode, spec.freeze_timeout_s)
        except (GateHeld, NotIdle) as error:
            return self._reply(call, (refusal_of(error),))
        if spec.mode is DrainMode.ABORT:
            await asyncio.to_thread(leader.abort_running)
            # Also those that are frozen: no rank counts its sequences before this drain is over.
            await asyncio.to_thread(self._machinery.engine.reap, True)
        try:
            how = await asyncio.wait_for(asyncio.wrap_future(emptied), timeout_s)
        except TimeoutError:
            running, aborted = gate.running, gate.drained(call.operation, lease_s)
            gate.release(call.operation)
            reason = f"{running} requests still ran after {timeout_s:g} s; allow more time or drain with mode abort"
            return self._reply(call, (Refusal(RejectCode.DRAIN_TIMEOUT, reason),), aborted_requests=aborted)
        aborted = gate.drained(call.operation, lease_s)
        if how is Emptied.IDLE:
            if spec.mode is DrainMode.ABORT:
                await asyncio.to_thread(self._machinery.engine.reap, False)
            return self._reply(call, aborted_requests=aborted)
        code = RejectCode.RANK_FAILED if how is Emptied.FAILED else RejectCode.CANCELLED
        return self._reply(call, (Refusal(code, f"the drain was {how.value}"),), aborted_requests=aborted)

    async def _stage(self, tx: Transaction, call: PhaseCall, timeout_s: float) -> PhaseReply:
        if tx.request is None or not tx.said_yes(Phase.PREFLIGHT):
            return self._refused(call, "no preflight of this operation said yes here; start it again")
        deadline = time.monotonic() + timeout_s
        try:
            planned = await asyncio.to_thread(self._machinery.stage, tx, self._leader, deadline)
            refusals, numbers = planned.refusals, planned.numbers
        except Exception as error:
            refusals, numbers = (refusal_of(error),), {}
        finally:
            # Also after a failure: the other ranks may have staged, so that only the coordinator may reopen.
            if self._leader is not None:
                self._leader.gate.staged(call.operation, timeout_s + DOUBT_S)
        return self._reply(
            call, refusals, **{**numbers, "prefix_tokens_lost": self._machinery.evicted_tokens(tx)}
        )

    async def _commit(self, tx: Transaction, call: PhaseCall) -> PhaseReply:
        if not tx.said_yes(Phase.STAGE):
            return self._refused(call, "this operation is not staged here")
        try:
            numbers = await asyncio.to_thread(self._machinery.commit, tx)
        except Exception as error:
            # Not the end: the gate is closed, and the coordinator asks again until its deadline.
            return self._reply(call, (replace(refusal_of(error), code=RejectCode.RANK_FAILED),))
        return self._reply(call, **numbers)

    async def _publish(self, tx: Transaction, call: PhaseCall) -> PhaseReply:
        if not tx.said_yes(Phase.COMMIT):
            return self._refused(call, "this operation is not committed here")
        closed = await asyncio.to_thread(self._machinery.publish)
        if self._leader is not None:
            self._leader.gate.settle(call.operation, closed)
        return self._reply(call)

    async def _abort(self, tx: Transaction, call: PhaseCall) -> PhaseReply:
        if tx.said_yes(Phase.COMMIT):
            return self._refused(call, "this operation is committed here; it can only go forward")
        try:
            await asyncio.to_thread(self._machinery.abort, tx)
        except Exception as error:
            return self._reply(call, (refusal_of(error),))
        if self._leader is not None:
            self._leader.gate.release(call.operation)
        tx.replies.pop(Phase.STAGE, None)
        return self._reply(call, prefix_tokens_lost=self._machinery.evicted_tokens(tx))

    # --- once, in turn ---

    async def _once(
        self, call: PhaseCall, work: Work, in_turn: bool = True, remember: bool = True
    ) -> PhaseReply:
        if (stale := self._check_epoch(call)) is not None:
            return stale
        tx = self._transactions.get(call.operation)
        known = tx.replies.get(call.phase)
        if known is not None and remember and (known.ok or call.phase is not Phase.COMMIT):
            return replace(known, epoch=call.epoch)
        task = tx.running.get(call.phase)
        if task is None:
            task = asyncio.create_task(self._run(tx, call, work, in_turn))
            tx.running[call.phase] = task
        # A caller that goes away leaves the work going (C7).
        return replace(await asyncio.shield(task), epoch=call.epoch)

    async def _run(self, tx: Transaction, call: PhaseCall, work: Work, in_turn: bool) -> PhaseReply:
        began = time.monotonic()
        try:
            if in_turn:
                async with self._turn:
                    if (stale := self._check_epoch(call)) is not None:
                        return stale  # a new coordinator came while this waited; not this phase's answer for ever
                    reply = await self._work(tx, call, work)
            else:
                reply = await self._work(tx, call, work)
        finally:
            del tx.running[call.phase]
        reply = tx.replies[call.phase] = replace(reply, seconds=time.monotonic() - began)
        return reply

    async def _work(self, tx: Transaction, call: PhaseCall, work: Work) -> PhaseReply:
        if tx.aborting and call.phase not in (Phase.COMMIT, Phase.PUBLISH):
            return self._refused(call, "this operation was aborted", RejectCode.CANCELLED)
        if self._machinery.error and call.phase is not Phase.COMMIT:
            return self._refused(call, self._machinery.error, RejectCode.RANK_FAILED)
        try:
            return await work(tx, call)
        except Exception as error:
            return self._reply(call, (refusal_of(error),))

    def _check_epoch(self, call: PhaseCall) -> PhaseReply | None:
        if call.epoch < self._epoch:
            return self._refused(call, f"epoch {call.epoch} is over; this rank has seen {self._epoch}")
        self._epoch = call.epoch
        return None

    def _refused(self, call: PhaseCall, reason: str, code: RejectCode = RejectCode.REFUSED) -> PhaseReply:
        return self._reply(call, (Refusal(code, reason),))

    def _reply(self, call: PhaseCall, refusals: tuple[Refusal, ...] = (), **numbers: object) -> PhaseReply:
        return PhaseReply(
            call.operation,
            call.phase,
            call.epoch,
            self._rank,
            self._incarnation,
            not refusals,
            refusals,
            **numbers,  # type: ignore[arg-type]
        )
