"""What the layers ask of each other, as protocols. Ray implements them in production, plain objects in tests.

front door --Control--> coordinator --RankPort--> ranks
front door --Inference--> leader rank's gate
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torpor.actors.audit import AuditEntry
from torpor.actors.config import ClusterConfig, ModelConfig
from torpor.actors.messages import (
    AbortOrder,
    AdmissionReply,
    DrainSpec,
    GenerateRequest,
    Hold,
    ModelView,
    Operation,
    OperationRequest,
    PhaseCall,
    PhaseReply,
    RankStatus,
    RestoreMode,
    TokenEvent,
    Trimmed,
)
from torpor.actors.news import Changes, Position


class RankUnreachable(Exception):
    """The rank's process is gone: it will never answer again. A time-out is not this; that is `unknown`."""


class ControlUnreachable(Exception):
    """There is no coordinator now, or it does not come back in time; the text says what to do."""


class KeyReused(Exception):
    """An idempotency key came with another request before (C5); the text says what to do."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a front end is not of use any more, and what to do. serves_on: answers that have begun go on for a while."""

    why: str
    serves_on: bool = False


class NoLease(Exception):
    """There is no lease to renew: the hold has ended, or never had one; the text says what to do."""


class ModelExists(Exception):
    """A model of this name is there, and was asked for otherwise; the text says what to do."""


class RankPort(Protocol):
    """One rank as the coordinator sees it. Rank 0 is the leader: it has the gate.

    Every method may raise RankUnreachable, or never answer (the caller has deadlines). All are idempotent for the
    same call: a repeated stage or commit of the same operation answers as the first did.
    """

    rank: int

    async def status(self, epoch: int | None = None) -> RankStatus:
        """epoch: of a coordinator that begins; from now on the rank refuses calls of lower ones."""

    async def preflight(self, call: PhaseCall, request: OperationRequest) -> PhaseReply:
        """Reads only. The rank keeps the plan for `stage`. Every answer brings the rank's status."""

    async def drain(self, call: PhaseCall, spec: DrainSpec, timeout_s: float, lease_s: float) -> PhaseReply:
        """Leader only. Closes the gate and waits until nothing runs; at the time-out reopens and answers ok False.

        Mode freeze waits for nobody: the stage stops what runs between two tokens, and it goes on when the gate
        opens. What an earlier operation has frozen does not run.

        Mode if_idle answers ok False at once where anything runs, and has then touched nothing.
        The gate reopens by itself when lease_s pass without a stage or a release.
        """

    async def stage(self, call: PhaseCall, timeout_s: float) -> PhaseReply: ...

    async def commit(self, call: PhaseCall) -> PhaseReply: ...

    async def abort(self, call: PhaseCall, lost: bool = False) -> PhaseReply:
        """Takes preflight, drain and stage back: memory as before; the gate as before the operation.

        lost: another rank is, so that the leader's gate is closed for good instead (`failed`).
        """

    async def publish(self, call: PhaseCall) -> PhaseReply:
        """Ends the transaction; the leader opens its gate if nothing is parked, paused or undefined.

        Every answer brings the rank's status.
        """

    async def trim(self, target_bytes: int) -> int:
        """Give back host memory that is kept for speed alone until this much is left; the bytes freed (M8)."""

    async def prefill(self, room_bytes: int, timeout_s: float, backups: bool, pool: bool) -> int:
        """Make host memory ready for the next sleep, room_bytes at most, while the rank serves; the bytes made.

        backups: of weights that do not change (M9). pool: idle memory for all that a sleep is to keep. An operation
        goes first, and what is asleep is left alone. Whatever goes wrong, the next sleep does it itself.
        """


class NoDeviceMemory(Exception):
    """A rank's load found too little memory on its device: lacking_bytes at least; 0: not known."""

    def __init__(self, detail: str, lacking_bytes: int = 0) -> None:
        super().__init__(detail)
        self.lacking_bytes = lacking_bytes


class RankMaker(Protocol):
    """Makes and ends the ranks of models. All but `make` may be repeated."""

    async def find(self, model: ModelConfig) -> Sequence[RankPort] | None:
        """Ports to the ranks that live, one a rank (to one that is gone: RankUnreachable); None: there are none."""

    async def make(
        self, model: ModelConfig, epoch: int, parked: Mapping[str, RestoreMode]
    ) -> Sequence[RankPort]:
        """New incarnations, which take nothing of the device before `load`. Raises what kept them from being made.

        parked: tags that are asleep when they have loaded, before anybody is let in.
        """

    async def load(self, model: ModelConfig) -> None:
        """Until all ranks have loaded; joins a load that runs. Raises what the first of them to fail raised.

        NoDeviceMemory where that was for want of device memory.
        """

    async def end(self, model: ModelConfig) -> None:
        """End what lives of the model. Its memory is free when this returns. Raises TimeoutError."""

    async def stop_serving(self, model: ModelConfig, why: str) -> None:
        """Tell the leader, if it lives, that the model is lost: its requests end with an error, none in silence."""


class Control(Protocol):
    """What the front door asks of the coordinator. Every method may raise ControlUnreachable."""

    async def submit(self, request: OperationRequest) -> Operation:
        """Start (or join, or refuse) an operation and return its record at once; a refusal is a finished one.

        Raises KeyReused.
        """

    async def wait(self, operation_id: str, timeout_s: float | None = None) -> Operation:
        """The record once it is finished, or as it is after timeout_s. KeyError when there is no such operation."""

    async def operation(self, operation_id: str) -> Operation: ...

    async def operations(self, model: str | None = None, limit: int = 100) -> list[Operation]:
        """Newest first."""

    async def cancel(self, operation_id: str) -> bool:
        """True when it will end as rejected/cancelled; False when it is decided or finished."""

    async def watch(self, name: str, seen: ModelView | None, timeout_s: float) -> ModelView:
        """As published, with no call to any rank: once its state, gate or hold are others than `seen`, or the time is up.

        KeyError when there is no such model.
        """

    async def renew(self, operation_id: str) -> Hold:
        """Lengthen the lease of the hold that this sleep is. KeyError for an unknown operation; raises NoLease."""

    async def changes(self, after: Position | None, wait_s: float) -> Changes:
        """What has happened since, waiting so long for something; None: nothing, only where one is.

        A position that is too old, or of another coordinator, gets a reset.
        """

    async def audit(self, entry: AuditEntry) -> None:
        """It is in the journal when this returns."""

    async def audits(self, limit: int = 100) -> list[AuditEntry]:
        """Newest first; the oldest are forgotten."""

    async def models(self, detail: bool = False) -> list[ModelView]:
        """detail asks every rank for its status; without it only published state, no call to any rank."""

    async def model(self, name: str) -> ModelView:
        """With ranks' status. KeyError when there is no such model."""

    async def trim(self, name: str, target_bytes: int) -> list[Trimmed]:
        """As RankPort.trim, of every rank. KeyError when there is no such model."""

    async def describe(self) -> ClusterConfig:
        """What the cluster is to look like now, its models included."""

    async def create(self, model: ModelConfig) -> ModelView:
        """Make a model; it is loading when this returns. One that was asked for alike is left as it is.

        Raises ModelExists. A model goes by an operation of kind delete.
        """

    async def adapt(self, model: ModelConfig) -> ModelView:
        """Give the model of this name these policies (changes.IN_PLACE); its ranks are not touched.

        KeyError when there is no such model. Raises ModelExists where its shape differs.
        """


class GateClosed(Exception):
    """The request met a closed gate. reason is a GateReason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or f"the gate is closed: {reason}")
        self.reason = reason


class LeaderLost(GateClosed):
    """The leader, or the connection to it, was lost before the request's first token.

    It may be submitted again, under another id. admitted: it had been let in, and may be what has ended the leader.
    """

    def __init__(self, detail: str, admitted: bool) -> None:
        super().__init__("failed", detail)
        self.admitted = admitted


class InvalidRequest(Exception):
    """The engine cannot serve this request as it is (an unknown role, a token that the model lacks, …)."""


class ContextTooLong(InvalidRequest):
    """Prompt and wanted tokens are more than the context holds."""


class QueueFull(Exception):
    """The engine's waiting list is at its bound."""


class Inference(Protocol):
    """What the front door asks of a model's leader rank."""

    def generate(self, model: str, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Admits, then yields events; the last has a finish_reason. Closing the iterator aborts the request (G4).

        An event that says nothing (TokenEvent.silent) tells that the request was let in and waits for its first token.
        Raises GateClosed (LeaderLost is one), InvalidRequest, QueueFull before the first event, KeyError for an
        unknown model.
        """

    async def abort_requests(self, model: str, request: str | None) -> int:
        """End requests with what they have so far, whichever front end sent them; how many.

        Also those that wait at front ends for the gate to open, as far as the leader, or this front end, knows of them.
        request: those whose id is this, or begins with it and a `/`; None: all. KeyError for an unknown model.
        """


EndWaiting = Callable[[str, str | None], int]


class InferenceAtLeaders(Inference, Protocol):
    """One that knows nobody who waits: what is asked goes to the leader at once."""

    def on_abort(self, end: EndWaiting) -> None:
        """end(model, request): called for each abort that another front end asks for; how many have waited here."""


class LeaderPort(Protocol):
    """The inference side of the leader rank, as one front end uses it (one batched stream per front end)."""

    async def submit(self, front_end: str, requests: Sequence[GenerateRequest]) -> list[AdmissionReply]: ...

    async def cancel(self, front_end: str, request_ids: Sequence[str]) -> None: ...

    async def abort_requests(self, front_end: str, request: str | None) -> int:
        """As Inference.abort_requests, of any front end. Those that wait at this one it ends itself."""

    async def aborted(self, front_end: str, order: str, count: int) -> None:
        """The answer to an AbortOrder: so many have waited."""

    def stream(self, front_end: str) -> AsyncIterator[list[TokenEvent | AbortOrder]]:
        """All events of this front end's requests, in batches, until it detaches or its lease ends."""

    async def renew(self, front_end: str) -> None:
        """Renew the lease (every 2 s, gone after 10): without it the front end's requests are aborted."""

    async def detach(self, front_end: str) -> None: ...
