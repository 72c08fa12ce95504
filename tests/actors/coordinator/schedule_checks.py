"""What must hold in a random schedule: at every call to a rank, and once all has come to an end."""

from __future__ import annotations

from collections import defaultdict

from coordinator_memory_journal import JournalStore
from coordinator_rig import RANK_BYTES, SIZES, MemoryRig

from torpor.actors.coordinator import MemoryRank
from torpor.actors.messages import (
    Kind,
    LedgerPhase,
    ModelState,
    Operation,
    OperationState,
    Origin,
    RankOutcome,
)

_TRANSACTIONS = (Kind.SLEEP, Kind.WAKE, Kind.UPDATE, Kind.PAUSE, Kind.UNPAUSE, Kind.RESET)
_AUTOMATIC = (Origin.REQUEST, Origin.LEASE)


class Watcher:
    """`see` every call of every rank; `broken` collects what should not have been."""

    def __init__(self, rig: MemoryRig) -> None:
        self.rig = rig
        self.broken: list[str] = []
        self._staged: dict[MemoryRank, str] = {}
        self._committed: dict[str, set[int]] = defaultdict(set)
        self._aborted: dict[str, set[int]] = defaultdict(set)

    @property
    def store(self) -> JournalStore:
        return self.rig.store

    def see(self, moment: str, method: str, rank: MemoryRank) -> None:
        """As MemoryRank.on_call."""
        when = f"{moment} {method} of {rank.model}/{rank.rank}"
        ranks = self.rig.cluster.ranks.get(rank.model, [])
        if rank in ranks and ranks[0].gate.open:
            for each in ranks:
                # A leader opens last, and a follower stages only behind a closed gate.
                ledger = each.ledger
                if not each.dead and (
                    ledger.parked or ledger.undefined or ledger.phase is not LedgerPhase.IDLE
                ):
                    self.broken.append(f"gate open {when}, rank {each.rank}: {ledger.phase}, {ledger.parked}")
                if not each.dead and ledger.written != ledger.weights_version:
                    self.broken.append(
                        f"gate open {when}, rank {each.rank}: version {ledger.weights_version} of {ledger.written}"
                    )
        if rank.device.free_bytes < 0:
            self.broken.append(f"{rank.device.id} overcommitted {when}")
        if moment == "after":
            self._note(method, rank)
        elif method == "commit":
            self._check_holds(rank.model, when)

    def _check_holds(self, model: str, when: str) -> None:
        """G6: what was put to sleep on purpose is woken by nothing but a wish, or the end of its own lease."""
        runtime = self.rig.coordinator._models.get(model)
        if runtime is None or runtime.running is None or runtime.running.request.kind is not Kind.WAKE:
            return
        asked, holds = runtime.running.request, {hold.operation for hold in runtime.published.holds}
        # There is none where the sleep that it names was rejected.
        if asked.releases and holds - {asked.releases}:
            self.broken.append(f"who leaves {asked.releases} wakes for {holds}, {when}")
        elif asked.origin in _AUTOMATIC and holds and holds != {asked.caller}:
            self.broken.append(f"a wake of origin {asked.origin} goes on under holds, {when}")

    def _note(self, method: str, rank: MemoryRank) -> None:
        """No commit before its decision, and none where another rank has taken its stage back."""
        operation, phase = rank.ledger.operation, rank.ledger.phase
        if method == "stage" and operation and phase is LedgerPhase.STAGED:
            self._staged[rank] = operation
        elif method == "abort" and rank in self._staged and phase is LedgerPhase.IDLE:
            self._aborted[self._staged.pop(rank)].add(rank.rank)
        elif method == "commit" and operation and phase is LedgerPhase.COMMITTED:
            self._staged.pop(rank, None)
            self._committed[operation].add(rank.rank)
            if not self.store.is_decided(operation):
                self.broken.append(f"{operation} committed on rank {rank.rank} and is not decided")
        for name in (self._committed.keys() & self._aborted.keys()) if method in ("abort", "commit") else ():
            self.broken.append(
                f"{name} committed on {self._committed[name]} and aborted on {self._aborted[name]}"
            )

    def check_outcome(self, outcome: Operation) -> None:
        """The record, the decision and what was done say the same."""
        name, ends = f"{outcome.kind} {outcome.id}", {rank.outcome for rank in outcome.ranks}
        decided = self.store.is_decided(outcome.id)
        if outcome.state is OperationState.RUNNING or outcome.finished_at is None:
            self.broken.append(f"{name} never ended")
        elif outcome.state is OperationState.SUCCEEDED and not outcome.dry_run:
            left = outcome.kind is Kind.WAKE and not outcome.phases  # one hold of several ended, and no more
            if outcome.kind in _TRANSACTIONS and not left and ends != {RankOutcome.COMMITTED}:
                self.broken.append(f"{name} succeeded with {ends}")
        elif outcome.state is OperationState.REJECTED and (
            decided or RankOutcome.COMMITTED in ends or self._committed.get(outcome.id)
        ):
            self.broken.append(f"{name} was rejected, decided {decided}, with {ends}")
        if outcome.state is not OperationState.SUCCEEDED and not outcome.reason:
            self.broken.append(f"{name} is {outcome.state} without a reason")

    def check_model(self, model: str) -> None:
        """Nothing moves any more: what is published is what the ranks have."""
        ranks, state = self.rig.cluster.ranks.get(model, []), self.rig.coordinator.published_state(model)
        if state is ModelState.FAILED:
            if ranks and ranks[0].gate.open:
                self.broken.append(f"{model} is failed, and its gate is open")
            return
        if state not in (ModelState.AWAKE, ModelState.ASLEEP):
            self.broken.append(f"{model} is {state} for ever")
            return
        for rank in ranks:
            self._check_rank(rank, ranks[0], state)
        asleep, undefined = bool(ranks[0].ledger.parked), bool(ranks[0].ledger.undefined)
        paused = ranks[0].ledger.paused
        if (state is ModelState.ASLEEP) is not asleep or ranks[0].gate.open is (
            asleep or undefined or paused
        ):
            self.broken.append(f"{model} is {state}: {ranks[0].gate}, parked {ranks[0].ledger.parked}")

    def check_leases(self, model: str) -> None:
        """Long after all of them."""
        state = self.rig.coordinator.published_state(model)
        holds = self.rig.coordinator._models[model].published.holds
        names = {hold.operation for hold in holds}
        over = state is ModelState.ASLEEP and len(names) == len(holds)
        if holds and state is not ModelState.FAILED and (not over or any(hold.lease_s for hold in holds)):
            self.broken.append(f"{model} is {state}, long after all leases, with {holds}")

    def _check_rank(self, rank: MemoryRank, leader: MemoryRank, state: ModelState) -> None:
        name, ledger, parked = f"{rank.model}/{rank.rank}", rank.ledger, rank.ledger.parked
        if rank.dead or not rank.loaded or ledger.phase is not LedgerPhase.IDLE:
            self.broken.append(f"{name} dead={rank.dead} {ledger.phase}, and its model is {state}")
            return
        if set(parked) != set(leader.ledger.parked):
            self.broken.append(f"{rank.model} is half asleep")
        published = self.rig.coordinator._models[rank.model].published
        if ledger.paused is not published.paused:
            self.broken.append(f"{name} has paused {ledger.paused}, published is {published.paused}")
        if ledger.weights_version != leader.ledger.weights_version:
            self.broken.append(f"{name} has weights {ledger.weights_version} and its leader others")
        if published.version_there not in (None, ledger.written):
            self.broken.append(f"{name} has {ledger.written}, told is {published.version_there}")
        mapped = RANK_BYTES - sum(SIZES[tag] for tag in parked)
        if rank.device.used[ledger.owner] != mapped:
            self.broken.append(f"{name} has {rank.device.used[ledger.owner]}, not {mapped}")
        if set(ledger.kept) != {tag for tag, mode in parked.items() if mode.preserves}:
            self.broken.append(f"{name} keeps {ledger.kept} for {parked}")

    def check_books(self) -> None:
        """Nothing is promised to operations that are over, and nothing is left of ranks that are gone."""
        if reserved := self.rig.coordinator.reserved_bytes():
            self.broken.append(f"{reserved} bytes promised to nobody")
        living = {
            rank.ledger.owner: rank
            for ranks in self.rig.cluster.ranks.values()
            for rank in ranks
            if not rank.dead and rank.loaded
        }
        for device in self.rig.cluster.devices:
            left = {owner for owner, used in device.used.items() if used and owner not in living}
            if left:
                self.broken.append(f"{device.id} is used by {left}, who are gone")
