"""Ledger and engine of a rank as one machine: what each phase does to both. Every method may block; none is async."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from torpor.actors.engine.protocol import Engine
from torpor.actors.messages import (
    GateReason,
    Kind,
    LedgerPhase,
    OperationRequest,
    Refusal,
    RejectCode,
    RestoreMode,
)
from torpor.actors.rank.leader import Leader
from torpor.actors.rank.ledger import RankLedger
from torpor.actors.rank.reload import LATE, TAG, Reload, plan_reload
from torpor.actors.rank.replies import (
    is_noop,
    modes_of,
    refusals_of,
    residual_of,
    shape_digest,
    undefined_by,
)
from torpor.actors.rank.transaction import Planned, Transaction
from torpor.actors.rank.update import Sources, Updates
from torpor.native import DeviceError, Plan, Stopped

QUIESCE_SLICE_S = 0.25  # how often a wait for the engine looks whether it was called off
COMMIT_ATTEMPTS = 3
PARK_S = 600.0  # whoever loads a rank has a deadline of its own
LOADING = "loading"  # what a ledger calls the operation by which a rank is born asleep


class Machinery:
    """error: why this rank serves no more, or "". undefined: tags whose bytes are there and mean nothing (C9)."""

    def __init__(
        self,
        ledger: RankLedger,
        engine: Engine,
        sources: Sources | None = None,
        modes: Mapping[str, RestoreMode] | None = None,
    ) -> None:
        """modes: by tag, where a sleep names none."""
        self.ledger = ledger
        self._modes = dict(modes or {})
        self.engine = engine
        self.weights_version = 0  # updates since it was loaded
        self._updates = Updates(engine, sources or Sources())
        self.error = ""
        self.paused = False
        self.undefined: frozenset[str] = frozenset()
        self._stepping = True
        self._planned = ""  # the last operation that could be done here
        self._rests_for = ""  # the operation whose stage has stopped the engine last
        self._last: tuple[str, Kind] | None = None  # operation and kind of the last one committed
        self._prefix_tokens = 0  # as last seen; while a stage or commit works nobody asks the managers
        self._working = False
        # The ledger answers a preflight that meets another reader as if an operation ran: they take turns here.
        self._reading = threading.Lock()

    def plan(self, operation: str, request: OperationRequest) -> Planned:
        """What the operation would do here. Reads only; traffic may run.

        When it says yes, no sequence comes or goes at rest until the operation ends: the ranks compare their plans.
        """
        if request.kind is Kind.UPDATE:
            return self._plan_update(operation, request)
        plan = self._plan(operation, request)
        refusals = self._updates.in_the_way() or refusals_of(plan)
        reload = None if refusals else self._plan_reload(request, plan)
        if not refusals:
            self._planned = operation
            self.engine.reap(False)
        memory = self.memory()
        numbers = {
            "digest": shape_digest(plan) + (f"+{reload.source.digest}" if reload else ""),
            "device_bytes": plan.device_bytes,
            "freed_bytes": plan.free_bytes,
            "kept_bytes": plan.keep_bytes,
            "host_bytes": plan.host_bytes + (reload.source.host_bytes if reload else 0),
            "disk_bytes": plan.disk_bytes,
            "reload_bytes": reload.source.size_bytes if reload else 0,
            "residual": residual_of(memory, request.tags),
            "modes": modes_of(plan),
            "prefix_tokens_lost": self.ledger.prefix_tokens_lost_by(plan),
        }
        return Planned(plan, refusals, numbers, reload)

    def stage(self, tx: Transaction, leader: Leader | None, deadline: float) -> Planned:
        """Stop the engine between two steps, plan again now that nothing moves, and stage.

        On a throw or a refusal the memory is as before. The leader's engine rests until the abort, since other ranks
        may have staged and a step is one of all ranks; a follower's goes on following.
        """
        assert tx.request is not None
        if tx.changes_nothing:
            return self._stage_noop(tx, deadline)
        if leader is not None:
            leader.gate.hold_for_stage(tx.operation, self._reason_for_stage(tx.request.kind))
        stepping, staged = self._stepping, False
        self._rests_for = tx.operation
        try:
            step = self._quiesce(tx, deadline)
            tx.prefix_tokens = self.prefix_tokens()
            planned = self.plan(tx.operation, tx.request)
            if planned.refusals:
                return planned
            if planned.plan is None:
                planned = self._updates.stage(tx, deadline)
                digest = planned.numbers["digest"]
            else:
                read = self._stage(tx, planned.plan, planned.reload, deadline)
                digest = planned.plan.digest + (f"+{read}" if read else "")
            staged = True
        finally:
            if not staged and stepping and leader is None:
                self._resume()
        tx.plan, tx.reload = planned.plan, planned.reload
        # Ranks that stopped at another step, or that hold other pages, must not go through together (M7).
        return Planned(planned.plan, (), {**planned.numbers, "digest": f"{digest}@{step}"})

    def park(self, modes: Mapping[str, RestoreMode], verify: bool = False) -> None:
        """Put these tags to sleep before anything else begins here. Raises what keeps them from it."""
        request = OperationRequest(Kind.SLEEP, "", tuple(sorted(modes)), restore=modes, verify=verify)
        self._quiesce(Transaction(LOADING), time.monotonic() + PARK_S)
        plan = self._plan(LOADING, request)
        if refusals := refusals_of(plan):
            raise RuntimeError("; ".join(refusal.reason for refusal in refusals))
        self.ledger.stage(plan, PARK_S)
        self._commit()
        self.ledger.publish()

    def stop(self) -> None:
        """From another thread: end a stage that runs."""
        self.ledger.stop()

    def commit(self, tx: Transaction) -> dict[str, Any]:
        """The last step. A failure that may pass is tried again; the ledger goes on where it stopped."""
        numbers = self._commit_update(tx) if tx.plan is None else self._commit_plan(tx, tx.plan)
        return {**numbers, "stays_closed": self._closed() is not None}

    def _commit_plan(self, tx: Transaction, plan: Plan) -> dict[str, Any]:
        self._working = True
        try:
            report = self._commit()
        finally:
            self._working = False
        kind = tx.request.kind if tx.request else Kind(plan.kind)
        if tx.reload is None:
            self.undefined |= undefined_by(plan)
        else:
            self.engine.weights_changed(tx.reload.others)
            self.undefined -= {TAG}
            self.weights_version = 0
        self._change_door(kind)
        self._last = (tx.operation, kind)
        return {
            "digest": plan.digest,
            "freed_bytes": int(report["freed_bytes"]),
            "device_bytes": int(report["device_bytes"]),
            "kept_bytes": plan.keep_bytes,
            "residual": residual_of(self.memory(), tx.request.tags if tx.request else None),
            "modes": modes_of(plan),
            "prefix_tokens_lost": max(0, tx.prefix_tokens - self.prefix_tokens()),
        }

    def _change_door(self, kind: Kind) -> None:
        """What an operation does besides the ledger's part. Repeatable."""
        if kind in (Kind.PAUSE, Kind.UNPAUSE):
            self.paused = kind is Kind.PAUSE
        elif kind is Kind.RESET:
            self.engine.forget_prefixes()

    def publish(self) -> GateReason | None:
        """End the transaction. None where the rank can serve again; then its engine steps."""
        if self._updates.current is not None:
            self._updates.current = None
        else:
            self.ledger.publish()
        return self._settle()

    def abort(self, tx: Transaction) -> None:
        """Take a stage back, where this operation has one. Raises Misuse after its commit has begun."""
        if not self._updates.abort(tx.operation):
            return
        status = self.ledger.status()
        if status["phase"] != "idle":
            if status["operation"] != tx.operation:
                return
            self.ledger.abort()
        # One that comes late must not set the engine going while other ranks may have staged another operation.
        self._settle(
            resume=tx.operation == self._rests_for, reap=tx.operation in (self._planned, self._rests_for)
        )

    def evicted_tokens(self, tx: Transaction) -> int:
        """Tokens of prefix that the operation has dropped for want of room, also where its stage was taken back."""
        status = self.ledger.status()
        return int(status["evicted"]["prefix_tokens"]) if status["operation"] == tx.operation else 0

    def transaction(self) -> tuple[LedgerPhase, str | None, Kind | None]:
        """Phase, operation and kind of what is staged, else of what was committed last."""
        if (update := self._updates.current) is not None:
            return update.phase, update.operation, Kind.UPDATE
        status = self.ledger.status()
        phase = LedgerPhase(status["phase"])
        if phase is not LedgerPhase.IDLE:
            return phase, str(status["operation"]), Kind(status["kind"])
        return (phase, *self._last) if self._last else (phase, None, None)

    def memory(self) -> list[dict[str, Any]]:
        """Rows of Ledger.memory; the last known ones while a stage or commit works."""
        with self._reading:
            return self.ledger.memory()

    def prefix_tokens(self) -> int:
        """What new sequences could find; the last known count while a stage or commit works."""
        if not self._working:
            self._prefix_tokens = self.ledger.prefix_tokens()
        return self._prefix_tokens

    def undefined_tags(self) -> tuple[str, ...]:
        """Awake without contents."""
        return tuple(sorted(self.undefined - set(self.ledger.parked_tags)))

    def _commit(self) -> dict[str, Any]:
        for _ in range(COMMIT_ATTEMPTS - 1):
            try:
                return self.ledger.commit()
            except DeviceError as error:
                if error.sticky:
                    raise
        return self.ledger.commit()

    def _settle(self, resume: bool = True, reap: bool = True) -> GateReason | None:
        """reap: no operation counts sequences here any more, so that those of cancelled requests may go."""
        if self.error:
            return GateReason.FAILED
        if (closed := self._closed()) is not None:
            if reap:
                self.engine.reap(True)
            return closed
        if resume:
            self._resume()
        return None

    def _closed(self) -> GateReason | None:
        """Why nobody can be served, whatever operations there are."""
        if self.ledger.parked_tags:
            return GateReason.ASLEEP
        if self.undefined:
            return GateReason.CONTENTS_UNDEFINED
        return GateReason.PAUSED if self.paused else None

    def _reason_for_stage(self, kind: Kind) -> GateReason:
        if not kind.moves_memory:
            return self._closed() or GateReason.DRAINING
        return GateReason.SLEEPING if kind is Kind.SLEEP else GateReason.WAKING

    def _plan_update(self, operation: str, request: OperationRequest) -> Planned:
        """Raises WeightsRefused."""
        planned = self._updates.plan(request, self.ledger.status()["phase"], self.ledger.parked_tags)
        if not planned.refusals:
            self._planned = operation
            self.engine.reap(False)
        return planned

    def _commit_update(self, tx: Transaction) -> dict[str, Any]:
        numbers = self._updates.commit(tx)
        lost = max(0, tx.prefix_tokens - self.prefix_tokens())
        self.undefined -= {TAG}
        self.weights_version += 1
        self._last = (tx.operation, Kind.UPDATE)
        return {**numbers, "prefix_tokens_lost": lost}

    def _plan_reload(self, request: OperationRequest, plan: Plan) -> Reload | None:
        """Of what this wake brings back without contents, or finds so. Raises WeightsRefused."""
        wanted = request.tags is None or TAG in request.tags
        undefined = wanted and TAG in self.undefined | undefined_by(plan)
        return plan_reload(request, undefined, self.weights_version, self.engine)

    def _plan(self, operation: str, request: OperationRequest) -> Plan:
        modes = dict(request.restore)
        if request.kind is Kind.SLEEP:
            # Only of tags that are there: what is not named is not refused.
            wanted = self.ledger.tags if request.tags is None else request.tags
            modes = {tag: self._modes[tag] for tag in wanted if tag in self._modes} | modes
        with self._reading:
            return self.ledger.preflight(
                # A pause and its like move no memory: to the ledger they are sleeps of no tag, done in the same steps.
                (request.kind if request.kind.moves_memory else Kind.SLEEP).value,
                operation,
                request.tags if request.kind.has_tags else (),
                {tag: mode.value for tag, mode in modes.items()},
                verify=bool(request.verify),
                overflow=request.overflow,
            )

    def _stage_noop(self, tx: Transaction, deadline: float) -> Planned:
        # Nothing changes (C1): traffic, if there is any, need not stop for it.
        assert tx.request is not None
        planned = self.plan(tx.operation, tx.request)
        assert planned.plan is not None
        if not is_noop(planned.plan):
            reason = "the memory changed since preflight; ask again"
            return Planned(planned.plan, (Refusal(RejectCode.REFUSED, reason),))
        self.ledger.stage(planned.plan, max(0.0, deadline - time.monotonic()))
        tx.plan = planned.plan
        return planned

    def _stage(self, tx: Transaction, plan: Plan, reload: Reload | None, deadline: float) -> str:
        """A digest of what was read from the source; empty where nothing was."""
        tx.in_ledger = self._working = True
        try:
            if tx.aborting:
                raise Stopped("the operation was aborted")
            self.ledger.stage(plan, max(0.0, deadline - time.monotonic()))
        finally:
            tx.in_ledger = self._working = False
        if plan.kind != "wake":
            return ""
        try:
            # Nobody reads the memory before the commit: what is half written is without contents as before.
            read = self.engine.reload_weights(tx.going_on(deadline, LATE)) if reload else ""
            woken = {row["tag"] for row in plan.items if not row["noop"]}
            if not set(self.ledger.parked_tags) - woken:
                self.engine.refresh()  # else the last wake does it, with all there that it may recompute from
        except BaseException:
            self.ledger.abort()
            raise
        return read

    def _quiesce(self, tx: Transaction, deadline: float) -> int:
        while True:
            if tx.aborting:
                raise Stopped("the operation was aborted")
            if error := self.engine.error():
                raise RuntimeError(f"the engine has stopped: {error}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the engine did not come to rest between two steps in time")
            try:
                step = self.engine.quiesce(min(QUIESCE_SLICE_S, left))
            except TimeoutError:
                continue
            self._stepping = False
            return step

    def _resume(self) -> None:
        if not self._stepping:
            self.engine.resume()
            self._stepping = True
