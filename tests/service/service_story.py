"""A front end, its coordinator and ranks in virtual time, what befalls them, and what must hold all the while."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "actors" / "coordinator"))

from coordinator_memory_journal import JournalStore
from coordinator_rig import CONFIG, PATIENCE_S, MemoryRig

from torpor.actors.config import GateConfig, ModelConfig
from torpor.actors.coordinator import Fault, MemoryRank
from torpor.actors.messages import (
    DrainMode,
    FinishReason,
    GateReason,
    GenerateRequest,
    Kind,
    LedgerPhase,
    ModelState,
    OnConflict,
    OperationRequest,
    Origin,
    TokenEvent,
)
from torpor.actors.ports import (
    ControlUnreachable,
    EndWaiting,
    GateClosed,
    LeaderLost,
    NoLease,
)
from torpor.service.gate.gates import Gates
from torpor.service.gate.patience import PatientInference
from torpor.service.gate.policy import NotLetIn, WhenClosed

QUEUE_LIMIT, QUEUE_TIMEOUT_S, LEASE_S, STEP_S = 3, 20.0, 6.0, 0.1
RPC_S = 0.001  # the same for all: who is sent first arrives first
AMPLE_S = 1.0
KEEPERS_SEE_S = 10.0  # that nobody waits any more
HOLDS_SEEN_S = 5.0  # by whoever waits, at the latest
ABORTED, SERVED, REFUSED, LOST, GONE = "aborted", "served", "refused", "lost", "gone"


@dataclass
class Counts:
    waiting: int = 0
    most: int = 0

    def count_waiting(self, model: str, change: int) -> None:
        self.waiting += change
        self.most = max(self.most, self.waiting)

    def observe_wait(self, model: str, seconds: float) -> None:
        pass


@dataclass
class Leader:
    """Inference at the in-memory rank's gate: a token a step, none while the rank's memory is elsewhere."""

    rig: MemoryRig
    admitted: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    end_waiting: EndWaiting | None = None
    on_sending: Any = None

    def on_abort(self, end: EndWaiting) -> None:
        self.end_waiting = end

    async def abort_requests(self, model: str, request: str | None) -> int:
        found = {one for one in self.running if request in (None, one.split("~")[0])}
        self.aborted |= found
        return len(found)

    async def generate(self, model: str, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        rank = self.rig.solo
        self.on_sending(request.id)
        await asyncio.sleep(RPC_S)
        if rank.dead:
            raise LeaderLost("the leader is gone", admitted=False)
        if not rank.gate.open:
            raise GateClosed(rank.gate.reason or GateReason.LOADING)
        rank.gate.running += 1
        self.admitted.append(request.id)
        self.running.add(request.id)
        said = 0
        try:
            while said < (request.sampling.max_tokens or 1):
                await asyncio.sleep(STEP_S)
                if rank.dead and said:
                    yield TokenEvent(request.id, finish_reason=FinishReason.ERROR, error="the leader died")
                    return
                if rank.dead:
                    raise LeaderLost("the leader has died", admitted=True)
                if request.id in self.aborted:
                    yield TokenEvent(request.id, finish_reason=FinishReason.ABORT)
                    return
                if not _rests(rank):
                    said += 1
                    yield TokenEvent(request.id, text="x", token_ids=(1,))
            yield TokenEvent(request.id, finish_reason=FinishReason.LENGTH)
        finally:
            self.running.discard(request.id)
            rank.gate.running -= 1
            rank.gate.quiet_since_s = asyncio.get_running_loop().time()


def _rests(rank: MemoryRank) -> bool:
    return bool(rank.ledger.parked) or rank.ledger.paused or rank.ledger.phase is not LedgerPhase.IDLE


class Control:
    """Over whichever coordinator there is; none now and then, also under a call."""

    def __init__(self, rig: MemoryRig) -> None:
        self._rig = rig
        self._calls: set[asyncio.Future[Any]] = set()
        self.down = False

    def lose(self) -> None:
        self.down = True
        for call in self._calls:
            call.cancel()

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            if self.down:
                raise ControlUnreachable("no coordinator now")
            asked = asyncio.ensure_future(getattr(self._rig.coordinator, name)(*arguments))
            self._calls.add(asked)
            try:
                await asyncio.wait((asked,))
            finally:
                self._calls.discard(asked)
                lost = asked.cancelled() or asked.cancel()
            if lost:
                raise ControlUnreachable("the coordinator has died")
            return asked.result()

        return call


class Story:
    """What happens, and what must hold all the while and at the end."""

    def __init__(self, policy: WhenClosed, write_s: float) -> None:
        """write_s: of the journal; meanwhile gates may be open of which nobody has heard."""
        gate = GateConfig(str(policy), queue_limit=QUEUE_LIMIT, queue_timeout_s=QUEUE_TIMEOUT_S)
        self.policy = policy
        config = replace(CONFIG, models=(ModelConfig("solo", gate=gate),))
        self.rig = MemoryRig(JournalStore(lambda: write_s), config)
        self.rig.with_maker()
        self.control = Control(self.rig)
        self.leader = Leader(self.rig, on_sending=self._check_order)
        self.counts = Counts()
        self.asked: list[asyncio.Task[str]] = []
        self.went_away: set[int] = set()
        self.operations: list[str] = []
        self.broken: list[str] = []
        self.held_since_s: float | None = None

    async def play(self, acts: list[tuple[tuple[Any, ...], float]]) -> None:
        rig = self.rig
        await rig.start()
        await rig.do(OperationRequest(Kind.WAKE, "solo", on_conflict=OnConflict.WAIT))  # when it is loaded
        gates = Gates(rig.config)
        self.patient = PatientInference(self.leader, self.control, gates, self.counts)  # type: ignore[arg-type]
        looking = asyncio.create_task(self._look_for_holds())
        for (name, *arguments), pause_s in acts:
            self._watch()
            await getattr(self, f"do_{name}")(*arguments)
            await asyncio.sleep(pause_s)
        await self._end()
        looking.cancel()
        await self.patient.close()
        await rig.stop()

    # --- what happens ---

    async def do_ask(self, tokens: int) -> None:
        number = len(self.asked)
        self.asked.append(asyncio.create_task(self._ask(number, tokens)))

    async def do_go_away(self, which: int) -> None:
        if self.asked:
            self.went_away.add(which % len(self.asked))
            self.asked[which % len(self.asked)].cancel()

    async def do_abort(self, which: int) -> None:
        if self.asked:
            await self.patient.abort_requests("solo", f"r{which % len(self.asked)}")

    async def do_operate(self, request: OperationRequest) -> None:
        self.operations.append((await self.rig.coordinator.submit(request)).id)

    async def do_cancel(self, which: int) -> None:
        if self.operations:
            await self.rig.coordinator.cancel(self.operations[which % len(self.operations)])

    async def do_renew(self, which: int) -> None:
        if self.operations:
            try:
                await self.rig.coordinator.renew(self.operations[which % len(self.operations)])
            except NoLease:
                return

    async def do_fault(self, method: str, fault: Fault) -> None:
        self.rig.solo.fault(method, fault)

    async def do_slow(self, method: str, seconds: float) -> None:
        self.rig.solo.delay_s = {method: seconds}

    async def do_restart(self, away_s: float) -> None:
        self.control.lose()
        await self.rig.stop()
        await asyncio.sleep(away_s)
        await self.rig.start()
        self.control.down = False

    async def do_die(self) -> None:
        self.rig.solo.die()

    async def _ask(self, number: int, tokens: int) -> str:
        loop, name = asyncio.get_running_loop(), f"r{number}"
        request = GenerateRequest(name, prompt="go on")
        request = replace(request, sampling=replace(request.sampling, max_tokens=tokens))
        began_s, events = loop.time(), []
        try:
            async for event in self.patient.generate("solo", request):
                events.append(event)
        except NotLetIn as refusal:
            if self.policy is WhenClosed.REJECT:
                self.broken.append(f"{name} was made to wait where nobody is: {refusal}")
            self._check_wait(name, loop.time() - began_s)
            held_s = 0.0 if self.held_since_s is None else loop.time() - self.held_since_s
            if self.policy is WhenClosed.WAKE and not refusal.full and held_s > HOLDS_SEEN_S:
                self.broken.append(f"{name} waited {held_s:.1f} s under a hold that it could not end")
            return REFUSED
        except GateClosed:
            self._check_wait(name, loop.time() - began_s)
            return REFUSED
        if not events or events[-1].finish_reason is None:
            self.broken.append(f"{name} ended in silence")
        if any(event.request != name for event in events):
            self.broken.append(f"{name} got events of {events}")
        said = sum(bool(event.token_ids) for event in events)
        match events[-1].finish_reason:
            case FinishReason.LENGTH if said == tokens:
                return SERVED
            case FinishReason.ABORT:
                return ABORTED
            case FinishReason.ERROR:
                return LOST
        self.broken.append(f"{name} said {said} of {tokens} tokens, then {events[-1]}")
        return LOST

    # --- what must hold ---

    def _check_wait(self, name: str, seconds: float) -> None:
        """Of one that was refused. Who was lost with its leader once may have run before it waits."""
        if seconds > QUEUE_TIMEOUT_S + AMPLE_S and not any(
            one.startswith(name) for one in self.leader.admitted
        ):
            self.broken.append(f"{name} waited {seconds:.1f} s")

    def _check_order(self, sent: str) -> None:
        """Nobody is sent to the gate before those who came earlier and wait still, or were just released."""
        number = {one.asked.id: one.visitor.number for one in self.patient._attempts}
        for one in self.patient._attempts:
            at_door = one.visitor in one.door._waiting or one.visitor in one.door._on_their_way
            if at_door and one.visitor.number < number[sent]:
                self.broken.append(f"{sent} overtook {one.asked.id}")

    async def _look_for_holds(self) -> None:
        """Since when the model has been held asleep with nothing on its way, in sight of the front end."""
        while True:
            runtime = self.rig.coordinator._models["solo"]
            held = bool(runtime.published.holds) and runtime.state() is ModelState.ASLEEP
            if self.control.down or runtime.queue or not held:
                self.held_since_s = None
            elif self.held_since_s is None:
                self.held_since_s = asyncio.get_running_loop().time()
            await asyncio.sleep(STEP_S)

    def _watch(self) -> None:
        for rank in self.rig.cluster.ranks["solo"]:
            rank.on_call = self._see

    def _see(self, moment: str, method: str, rank: MemoryRank) -> None:
        runtime = self.rig.coordinator._models.get("solo")
        run = runtime.running if runtime is not None else None
        if runtime is None or run is None or (moment, method) != ("before", "commit"):
            return
        if run.request.origin is Origin.REQUEST and runtime.published.holds:
            self.broken.append(f"a request wakes a model that is held: {runtime.published.holds}")
        if (
            run.request.kind is Kind.SLEEP
            and rank.gate.running
            and run.request.drain.mode is not DrainMode.FREEZE
        ):
            self.broken.append(f"{rank.gate.running} run while it falls asleep")

    async def _end(self) -> None:
        """All that is in the way goes; every request comes to an end, and nothing of it is left."""
        rank = self.rig.solo
        rank._faults.clear()
        rank.delay_s = {}
        if self.rig.coordinator.published_state("solo") is not ModelState.FAILED:
            for kind in (Kind.UNPAUSE, Kind.WAKE):
                await self.rig.do(OperationRequest(kind, "solo", on_conflict=OnConflict.WAIT))
        _, hanging = await asyncio.wait(self.asked, timeout=PATIENCE_S) if self.asked else ((), ())
        self.broken += [f"r{self.asked.index(task)} hangs" for task in hanging]
        for task in hanging:
            task.cancel()
        ends = await asyncio.gather(*self.asked, return_exceptions=True)
        for number, end in enumerate(ends):
            gone = number in self.went_away and isinstance(end, asyncio.CancelledError)
            if isinstance(end, BaseException) and not gone:
                self.broken.append(f"r{number} ended by {end!r}")
        await asyncio.sleep(KEEPERS_SEE_S)
        left = {
            "who waits, as counted": self.counts.waiting,
            "attempts": len(self.patient._attempts),
            "at doors": sum(
                len(door._waiting) + len(door._on_their_way) + len(door._placed)
                for door in self.patient._doors.values()
            ),
            "keepers": len(self.patient._keeper._tasks),
            "inside": len(self.leader.running),
            "places at the gate": self.rig.solo.gate.running if not self.rig.solo.dead else 0,
        }
        self.broken += [f"left behind, {what}: {count}" for what, count in left.items() if count]
        if self.counts.most > (0 if self.policy is WhenClosed.REJECT else QUEUE_LIMIT):
            self.broken.append(f"{self.counts.most} waited at once")
