"""One seed's cluster, whose coordinator makes and ends its ranks, and what befalls it: faults, requests, crashes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator_memory_journal import JournalStore
from coordinator_rig import CONFIG, PATIENCE_S, RANK_BYTES, MemoryRig
from schedule_checks import Watcher

from torpor.actors.config import ModelConfig, RecoverPolicy
from torpor.actors.coordinator import Fault, MemoryMaker, MemoryRank
from torpor.actors.coordinator.watch import FIRST_PAUSE_S, MAX_ATTEMPTS, WATCH_S
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    GateReason,
    Kind,
    LedgerPhase,
    ModelState,
    OnConflict,
    OnDiscard,
    OnExpiry,
    Operation,
    OperationRequest,
    OperationState,
    Origin,
    RestoreMode,
)
from torpor.actors.ports import ControlUnreachable, ModelExists, NoLease, RankPort

MODELS = ("chat", "solo")
DOOR = (Kind.PAUSE, Kind.UNPAUSE, Kind.RESET)
KINDS = (Kind.SLEEP,) * 5 + (Kind.WAKE,) * 5 + (Kind.RECOVER, Kind.DELETE, Kind.UPDATE, *DOOR)
TAGS: tuple[tuple[str, ...] | None, ...] = (None, None, None, ("weights",), ("kv_cache",))
METHODS = ("status", "preflight", "drain", "stage", "commit", "publish", "abort")
WRITES = ("_begin", "_decide", "_finish", "_publish", "_put_key", "_finish_deletion")
RARELY = (True, False, False)
FAULTS = (Fault.REFUSE, Fault.RAISE, Fault.HANG, Fault.LOSE, Fault.STALE)
STATUS_FAULTS = (Fault.RAISE, Fault.HANG, Fault.LOSE)
SILENCE_S = 3000.0  # all that is asked again in the background has come to an end by then
LONGEST_PAUSE_S = FIRST_PAUSE_S * 2 ** (MAX_ATTEMPTS - 2)  # before the last recovery that nobody asks for
QUIET_S = LONGEST_PAUSE_S + WATCH_S + 2 * len(MODELS) * WATCH_S
STRANGER = "another process"


class WatchedMaker(MemoryMaker):
    """Every rank that it makes is looked at."""

    watcher: Watcher

    async def make(
        self, model: ModelConfig, epoch: int, parked: Mapping[str, RestoreMode]
    ) -> Sequence[RankPort]:
        ranks = await super().make(model, epoch, parked)
        for rank in self.cluster.ranks[model.name]:
            rank.on_call = self.watcher.see
        return ranks


class Schedule:
    """`play`, then `settle`; watcher.broken tells what should not have been."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choice = self.random.choice
        policy, idle_s = choice(list(RecoverPolicy)), choice((None, None, 8.0))
        self.models = tuple(
            replace(
                model,
                recover=policy,
                on_discard=choice(list(OnDiscard)),
                sleep_after_idle_s=idle_s if model.name == "solo" else None,
            )
            for model in CONFIG.models
        )
        latencies_s = choice(((0.0,), (0.0, 0.0, 0.02)))
        store = JournalStore(lambda: self.random.choice(latencies_s))
        self.rig = MemoryRig(
            store,
            replace(CONFIG, models=self.models),
            host_limit_bytes=choice((1 << 40, 1 << 40, 2 * RANK_BYTES)),
        )
        self.watcher = Watcher(self.rig)
        self.maker = WatchedMaker(self.rig.cluster)
        self.rig.maker, self.maker.watcher = self.maker, self.watcher
        for ranks in self.rig.cluster.ranks.values():
            for rank in ranks:
                rank.on_call = self.watcher.see
        self.accepted: list[str] = []
        self._traffic: set[asyncio.TimerHandle] = set()

    async def play(self) -> None:
        await self.rig.start()
        for _ in range(self.random.randrange(3, 9)):
            for _ in range(self.random.randrange(3)):
                await self._mishap()
            if self.random.random() < 0.3:
                self._arrive(self.random.choice(MODELS))
            await self._submit(self._request())
            await asyncio.sleep(self.random.choice((0.0, 0.0, 0.05, 0.5, 5.0, 30.0)))
            if self.random.random() < 0.2 and self.accepted:
                await self.rig.coordinator.cancel(self.accepted[-1])
            if self.random.random() < 0.2 and self.accepted:
                await self._renew(self.accepted[-1])
            if self.random.random() < 0.2:
                await self.rig.restart()

    # --- what is asked for ---

    def _request(self) -> OperationRequest:
        choice, kind, model = self.random.choice, self.random.choice(KINDS), self.random.choice(MODELS)
        wait = choice(list(OnConflict))
        if kind is Kind.RECOVER:
            wanted = choice((None, None, ModelState.AWAKE, ModelState.ASLEEP))
            stale = self.random.random() < 0.5
            return OperationRequest(kind, model, on_conflict=wait, to=wanted, accept_stale_weights=stale)
        spec = DrainSpec(choice(list(DrainMode)), choice((None, 2.0)))
        if kind is Kind.DELETE:
            return OperationRequest(kind, model, on_conflict=wait, drain=spec)
        if kind is Kind.UPDATE:
            path = f"/weights/{self.random.randrange(3)}"
            return OperationRequest(kind, model, on_conflict=wait, drain=spec, weights_path=path)
        if kind in DOOR:
            return OperationRequest(kind, model, (), on_conflict=wait, drain=spec)
        sleep = kind is Kind.SLEEP
        return OperationRequest(
            kind,
            model,
            tags=choice(TAGS),
            restore={
                tag: choice(list(RestoreMode))
                for tag in ("kv_cache", "weights")
                if self.random.random() < 0.3
            },
            drain=spec,
            on_conflict=wait,
            dry_run=self.random.random() < 0.1,
            timeout_s=choice((None, None, 3.0, 40.0)),
            idempotency_key=choice((None, None, f"key-{self.random.randrange(10**9)}")),
            wake_on_request=sleep and self.random.random() < 0.2,
            lease_s=choice((None, None, 6.0)) if sleep else None,
            releases=choice(self.accepted) if not sleep and self.accepted and choice(RARELY) else "",
            on_expiry=choice(list(OnExpiry)),
            on_discard=None if sleep else choice((None, None, *OnDiscard)),
            accept_stale_weights=not sleep and self.random.random() < 0.2,
            origin=choice((Origin.CALLER, Origin.CALLER, Origin.IDLENESS if sleep else Origin.REQUEST)),
        )

    async def _submit(self, request: OperationRequest) -> None:
        runtime = self.rig.coordinator._models.get(request.model)
        if runtime is not None and self.random.random() < 0.1:
            request = replace(request, generation=runtime.published.generation)
        try:
            self.accepted.append((await self.rig.coordinator.submit(request)).id)
        except ControlUnreachable:
            return  # the disk was full, and nothing was begun

    async def _renew(self, operation: str) -> None:
        try:
            await self.rig.coordinator.renew(operation)
        except NoLease:
            return

    # --- what befalls them ---

    def _ranks(self) -> list[MemoryRank]:
        return [rank for ranks in self.rig.cluster.ranks.values() for rank in ranks]

    async def _mishap(self) -> None:
        what = self.random.random()
        if what < 0.65:
            self._message_fault()
        elif what < 0.70 and self._ranks():
            self.random.choice(self._ranks()).die()
        elif what < 0.78:
            method = self.random.choice(("make", "load", "end"))
            self.maker.errors[method].append(RuntimeError("as the schedule has it"))
        elif what < 0.84:
            self.maker.delay_s = {self.random.choice(("make", "load", "end")): self.random.choice((0.3, 3.0))}
        elif what < 0.88:
            self.rig.store.refusals[self.random.choice(WRITES)] += 1
        elif what < 0.94:
            device = self.random.choice(self.rig.cluster.devices)
            device.take(STRANGER, max(0, device.free_bytes - self.random.choice((0, RANK_BYTES // 2))))
        else:
            await self._make_models()

    def _message_fault(self) -> None:
        if not self._ranks():
            return
        rank, method = self.random.choice(self._ranks()), self.random.choice(METHODS)
        if self.random.random() < 0.05:
            rank.fault(method, self.random.choice((Fault.DIE, Fault.DIE_AFTER)))
        elif method == "status":
            rank.fault(method, self.random.choice(STATUS_FAULTS))
        else:
            rank.fault(method, self.random.choice(FAULTS), self.random.choice((1, 1, 1, 2)))
        rank.delay_s[self.random.choice(METHODS)] = self.random.choice((0.0, 0.1, 1.0, 12.0))

    async def _make_models(self) -> None:
        for model in self.models:
            try:
                await self.rig.coordinator.create(model)
            except (ModelExists, ControlUnreachable):
                continue

    def _arrive(self, model: str) -> None:
        """An inference request that is let in where the gate is open, and leaves when it has had its time."""
        ranks = self.rig.cluster.ranks.get(model, [])
        if ranks and ranks[0].gate.open:
            ranks[0].gate.running += 1
            after_s = self.random.choice((0.2, 1.0, 1.0, 40.0))
            self._traffic.add(asyncio.get_running_loop().call_later(after_s, self._leave, ranks[0]))

    def _leave(self, leader: MemoryRank) -> None:
        if leader.ledger.parked or leader.ledger.paused or leader.ledger.phase is not LedgerPhase.IDLE:
            self._traffic.add(asyncio.get_running_loop().call_later(5.0, self._leave, leader))  # it is frozen
        elif leader.gate.running:  # not aborted
            leader.gate.running -= 1
            leader.gate.quiet_since_s = asyncio.get_running_loop().time()

    # --- the end ---

    async def settle(self) -> list[Operation]:
        """Everything comes to an end, and agrees; then whatever is failed can be had back."""
        self._calm()
        await self._keep_awake()
        await self._be_quiet()
        outcomes = [await self._outcome(name) for name in self.accepted]
        for outcome in outcomes:
            self.watcher.check_outcome(outcome)
        for model in list(self.rig.coordinator._models):
            self.watcher.check_model(model)
            self.watcher.check_leases(model)
        self.watcher.check_books()
        for model in list(self.rig.coordinator._models):
            outcomes.append(await self._have_back(model))
        self.watcher.check_books()
        return outcomes

    def _calm(self) -> None:
        for handle in self._traffic:
            handle.cancel()
        for ranks in self.rig.cluster.ranks.values():
            ranks[0].gate.running = 0
            for rank in ranks:
                rank.delay_s = {}  # what is always too slow never succeeds; single faults go on
        for device in self.rig.cluster.devices:
            device.used.pop(STRANGER, None)
        self.maker.errors.clear()
        self.maker.delay_s = {}
        self.rig.store.refusals.clear()

    async def _keep_awake(self) -> None:
        """Nobody falls asleep by idleness any more, else one would just when it is looked at."""
        for runtime in list(self.rig.coordinator._models.values()):
            if not runtime.deleting:
                await self.rig.coordinator.adapt(replace(runtime.config, sleep_after_idle_s=None))

    async def _be_quiet(self) -> None:
        """Until nothing is on its way and nothing changes any more.

        Two looks with no news between them, so far apart that whatever comes by itself has come: the death of a rank
        is seen by the next watch, and a failed model's next recovery begins after a pause, at most the longest one.
        A watch looks at one model after another, and waits so long for a rank that does not answer.
        """
        loop, quiet, pause_s = asyncio.get_running_loop(), False, QUIET_S
        until_s, seen = loop.time() + SILENCE_S, self.rig.coordinator.feed.position
        while not quiet and loop.time() < until_s:
            await asyncio.sleep(pause_s)
            models = list(self.rig.coordinator._models.values())
            states = [runtime.state() for runtime in models]
            settled = (ModelState.AWAKE, ModelState.ASLEEP, ModelState.FAILED)
            # A failed one may be well once its new ranks have answered.
            doubt = any(runtime.doubt or runtime.settling.locked() for runtime in models)
            at_rest = (
                self.rig.coordinator._register.idle
                and not doubt
                and all(state in settled for state in states)
            )
            # A drain that nobody could be told to take back ends with its lease, and holds end with theirs.
            drained = any(
                ranks[0].gate.reason is GateReason.DRAINING for ranks in self.rig.cluster.ranks.values()
            )
            leased = any(
                hold.lease_s is not None
                for runtime in models
                if not runtime.published.failed
                for hold in runtime.published.holds
            )
            at_rest = at_rest and not drained and not leased
            quiet = at_rest and self.rig.coordinator.feed.position == seen
            seen = self.rig.coordinator.feed.position
            pause_s = QUIET_S if at_rest else min(1.5 * pause_s, 60.0)

    async def _outcome(self, name: str) -> Operation:
        return await self.rig.coordinator.wait(name, PATIENCE_S)

    async def _have_back(self, model: str) -> Operation:
        wish = OperationRequest(Kind.RECOVER, model, on_conflict=OnConflict.WAIT, accept_stale_weights=True)
        recovery = await self.rig.do(wish)
        state = self.rig.coordinator.published_state(model)
        if recovery.state is not OperationState.SUCCEEDED or state is ModelState.FAILED:
            self.watcher.broken.append(f"{model} is {state} after {recovery.state}: {recovery.reason}")
        self.watcher.check_model(model)
        return recovery
