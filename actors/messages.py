"""The words that coordinator, ranks and front doors share: enums, and frozen messages. Nothing here does anything.

Durations are seconds, sizes bytes, instants Unix time. What is sent is plain data, so that it crosses Ray, SQLite
and HTTP alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

# They are messages too, kept in files of their own.
from torpor.actors.generation import AbortOrder as AbortOrder
from torpor.actors.generation import Admission as Admission
from torpor.actors.generation import AdmissionReply as AdmissionReply
from torpor.actors.generation import FinishReason as FinishReason
from torpor.actors.generation import GenerateRequest as GenerateRequest
from torpor.actors.generation import Sampling as Sampling
from torpor.actors.generation import TokenEvent as TokenEvent
from torpor.actors.generation import TokenLogprob as TokenLogprob
from torpor.actors.wishes import DrainMode as DrainMode
from torpor.actors.wishes import DrainSpec as DrainSpec
from torpor.actors.wishes import MakeRoom as MakeRoom
from torpor.actors.wishes import OnConflict as OnConflict
from torpor.actors.wishes import OnDiscard as OnDiscard
from torpor.actors.wishes import OnExpiry as OnExpiry
from torpor.actors.wishes import RestoreMode as RestoreMode


class Kind(StrEnum):
    SLEEP = "sleep"
    WAKE = "wake"
    RECOVER = "recover"  # all ranks replaced, towards the last published state
    DELETE = "delete"  # the ranks ended, the model forgotten
    UPDATE = "update"  # other weights, written in place
    PAUSE = "pause"  # nobody is let in, and no step is made; no memory is touched
    UNPAUSE = "unpause"
    RESET = "reset"  # prefixes forgotten, on every tier

    @property
    def moves_memory(self) -> bool:
        return self in (Kind.SLEEP, Kind.WAKE)

    @property
    def has_tags(self) -> bool:
        return self not in (Kind.PAUSE, Kind.UNPAUSE, Kind.RESET)


class ModelState(StrEnum):
    LOADING = "loading"
    AWAKE = "awake"
    SLEEPING = "sleeping"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"
    RECOVERING = "recovering"


class GateReason(StrEnum):
    """Why a gate is closed."""

    LOADING = "loading"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    ASLEEP = "asleep"
    WAKING = "waking"
    PAUSED = "paused"
    CONTENTS_UNDEFINED = "contents_undefined"
    IN_DOUBT = "in_doubt"
    FAILED = "failed"
    RECOVERING = "recovering"


class Origin(StrEnum):
    """Who wants an operation."""

    CALLER = "caller"  # a person or program asked for it; such a sleep is a hold
    REQUEST = "request"  # an inference request met a sleeping model
    IDLENESS = "idleness"  # nothing was asked of the model for long enough
    ROOM = "room"  # another model needs its memory
    LEASE = "lease"  # the last hold's lease has ended
    FAILURE = "failure"  # the model has failed

    @property
    def automatic(self) -> bool:
        """Nobody asked for it, so that it is in nobody's way."""
        return self is not Origin.CALLER


class Phase(StrEnum):
    PREFLIGHT = "preflight"
    DRAIN = "drain"
    STAGE = "stage"
    COMMIT = "commit"
    PUBLISH = "publish"
    END = "end"  # of recover and delete: the ranks' processes
    LOAD = "load"  # of recover: new ones


class OperationState(StrEnum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    REJECTED = "rejected"
    FAILED = "failed"


class RankOutcome(StrEnum):
    PENDING = "pending"
    PREPARED = "prepared"  # preflight said yes
    STAGED = "staged"
    COMMITTED = "committed"
    ABORTED = "aborted"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"  # did not answer


class RejectCode(StrEnum):
    """Why an operation was rejected or refused; problem codes of the HTTP surface are these words."""

    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_TAG = "unknown_tag"
    CONFLICT = "conflict"  # another operation runs
    GENERATION = "generation"  # the model has changed since the caller looked
    HELD = "held"  # an automatic wake met a hold
    WRONG_STATE = "wrong_state"  # loading, failed, recovering
    DEVICE_MEMORY = "device_memory"
    HOST_MEMORY = "host_memory"
    DISK_SPACE = "disk_space"
    CONTENTS_CORRUPT = "contents_corrupt"  # what comes back is not what went to sleep
    EXTERNAL_REGISTRATION = "external_registration"
    DEVICE_BUSY = "device_busy"
    NOT_IDLE = "not_idle"  # a drain with mode if_idle found requests
    DRAIN_TIMEOUT = "drain_timeout"
    STAGE_TIMEOUT = "stage_timeout"
    DIGEST_MISMATCH = "digest_mismatch"
    RANK_FAILED = "rank_failed"
    WEIGHTS_REFUSED = "weights_refused"  # an update's source does not fit the model, or may not be read
    STALE_WEIGHTS = "stale_weights"  # recover would bring back older weights than those published
    REFUSED = "refused"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Hold:
    """One sleep that was asked for. `operation` is its id, by which its lease is renewed.

    lease_s None: it has no lease, and ends by an explicit wake only. expires_at: Unix time.
    """

    operation: str
    by: str
    since: float
    lease_s: float | None = None
    on_expiry: OnExpiry = OnExpiry.KEEP
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """An operation as asked for. tags None = every tag of the model; restore by tag, missing = defaults.

    A wake with `releases` ends that one hold, named by its sleep's operation, and nobody else's: the model wakes, with
    all its tags, when it was the last hold; else the wake succeeds and leaves the model asleep. So does one whose hold
    has ended already. Rejected, it leaves the hold as it was.
    An update takes drain and one of weights_path and weights_handed (a name that ranks can fetch tensors by).
    A delete and a pause take drain; pause, unpause and reset have no tags, whatever is given.
    A recover takes `to` (a state to reach; None = the last published one) and
    accept_stale_weights (weights that were updated since may come back as their source has them). So does a wake,
    of weights that are without contents.
    """

    kind: Kind
    model: str
    tags: tuple[str, ...] | None = None
    restore: Mapping[str, RestoreMode] = field(default_factory=dict)
    drain: DrainSpec = field(default_factory=DrainSpec)
    overflow: str = "reject"
    verify: bool | None = None  # None: a sleep as configured, a wake compares what was recorded
    dry_run: bool = False
    on_conflict: OnConflict = OnConflict.REJECT
    wake_on_request: bool = False
    timeout_s: float | None = None
    idempotency_key: str | None = None  # already joined with caller and route
    origin: Origin = Origin.CALLER
    caller: str = ""  # whose hold it is, for people
    lease_s: float | None = None  # of the hold that a sleep is
    on_expiry: OnExpiry = OnExpiry.KEEP
    make_room: MakeRoom | None = None  # of a wake; None: as configured for one on request, else none
    releases: str = ""
    to: ModelState | None = None
    accept_stale_weights: bool = False
    on_discard: OnDiscard | None = None  # of a wake; None: as configured, on a rank: wait
    weights_path: str = ""
    weights_handed: str = ""
    generation: int | None = (
        None  # refused where the model has another: it has changed since the caller looked
    )
    traceparent: str = ""  # W3C, of the span beneath which it is traced; says nothing of what is asked for


@dataclass(frozen=True, slots=True)
class Refusal:
    code: RejectCode
    reason: str  # what to do next, for a person
    tag: str = ""
    needed_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PhaseCall:
    """What every message to a rank carries. Ranks refuse lower epochs; replies repeat the first three (+ incarnation)."""

    operation: str
    phase: Phase
    epoch: int
    traceparent: str = ""  # of the call, where it is traced


@dataclass(frozen=True, slots=True)
class PhaseReply:
    """A rank's answer. ok False: refused or failed, with refusals; the rank is as before the phase (but for commit).

    status: with every answer to preflight and publish, how the rank is then, so that nobody need ask for it.
    stays_closed: of a leader's commit, that no publish opens its gate: something is parked, paused or undefined.
    """

    operation: str
    phase: Phase
    epoch: int
    rank: int
    incarnation: str
    ok: bool
    refusals: tuple[Refusal, ...] = ()
    digest: str = ""
    # preflight: planned; stage: moved; commit: really freed or taken
    device_bytes: int = 0  # wake: needed / taken
    freed_bytes: int = 0  # sleep
    kept_bytes: int = 0
    host_bytes: int = 0  # to be newly committed
    disk_bytes: int = 0  # to be newly taken on the node's disk
    reload_bytes: int = 0  # wake: of weights, from their source
    residual: Mapping[str, int] = field(default_factory=dict)
    aborted_requests: int = 0
    prefix_tokens_lost: int = 0  # preflight: planned; stage and abort: evicted by then; commit: in all
    modes: Mapping[str, str] = field(default_factory=dict)  # tag -> mode really in force
    seconds: float = 0.0
    status: RankStatus | None = None
    stays_closed: bool = False


class LedgerPhase(StrEnum):
    IDLE = "idle"
    STAGED = "staged"
    COMMITTING = "committing"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What a rank has given back of host memory that it kept for speed. error: why it told nothing."""

    rank: int
    freed_bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class EngineChoices:
    """What an engine has chosen where its settings leave it the choice; empty where it does not tell."""

    attention: str = ""  # torch or triton
    collectives: str = ""  # nccl or gloo; "": it has one rank
    graphs_off: str | None = None  # why it decodes without CUDA graphs; "": it has them; None: not told


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank answers to `status`: enough to resolve doubt, and all that GET /models shows of it."""

    model: str
    rank: int
    incarnation: str
    node: str
    pid: int
    epoch: int
    loaded: bool
    ledger_phase: LedgerPhase
    operation: str | None  # of the staged or last committed transaction
    kind: Kind | None
    tags: tuple[str, ...]
    parked_tags: tuple[str, ...]
    undefined_tags: tuple[str, ...]  # awake without contents
    device_kind: str
    device_id: str
    device_free_bytes: int
    device_total_bytes: int
    host_limit_bytes: int = 0  # what the rank's node may keep, as seen there; 0 = not told
    memory: tuple[Mapping[str, object], ...] = ()  # Ledger.memory() rows
    gate_open: bool = False  # leader only
    gate_reason: GateReason | None = None
    idle_s: float = 0.0  # leader only: since the last request came or ended; 0 while any is inside
    live_sequences: int = 0  # frozen ones included
    frozen_requests: int = 0  # leader only
    prefix_tokens: int = 0
    error: str = ""
    staging: str | None = None  # the operation whose stage runs; it is not in ledger_phase yet
    staging_kind: Kind | None = None
    gate_operation: str | None = None  # leader only: who has closed the gate and not opened it again
    weights_version: int = 0  # updates since it was loaded
    paused: bool = False  # whatever else closes the gate
    engine: EngineChoices = field(default_factory=EngineChoices)
    staged_digest: str = ""  # as the stage of `operation` answered, while ledger_phase is staged


@dataclass(slots=True)
class PhaseRecord:
    name: Phase
    started_at: float
    seconds: float = 0.0
    bytes: int = 0


@dataclass(slots=True)
class RankRecord:
    rank: int
    node: str = ""
    device: str = ""
    outcome: RankOutcome = RankOutcome.PENDING
    reason: str | None = None
    freed_bytes: int = 0
    kept_bytes: int = 0
    residual: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Operation:
    """An operation from request to outcome, as GET /operations/{id} shows it."""

    id: str
    kind: Kind
    model: str
    state: OperationState
    tags: list[str]
    restore: dict[str, str]
    created_at: float
    reason: str | None = None
    code: RejectCode | None = None
    needed_bytes: int | None = None
    free_bytes: int | None = None
    aborted_requests: int = 0
    prefix_tokens_lost: int = 0
    phases: list[PhaseRecord] = field(default_factory=list)
    ranks: list[RankRecord] = field(default_factory=list)
    finished_at: float | None = None
    dry_run: bool = False
    origin: Origin = Origin.CALLER
    lost_bytes: dict[str, int] = field(
        default_factory=dict
    )  # by tag: preserved contents that are gone (recover)
    weights_version: int | None = None  # that an update has brought
    reloaded_bytes: int = 0  # of weights that a wake has read from their source, over all ranks


@dataclass(slots=True)
class ModelView:
    """A model as GET /models/{m} shows it."""

    name: str
    state: ModelState
    gate_open: bool
    gate_reason: GateReason | None
    generation: int
    parked_tags: list[str]
    tags: list[str]
    hold: bool
    weights_version: int | None  # None: the weights are without contents
    tensor_parallel: int
    operation: str | None = None  # the running one
    ranks: list[RankStatus] = field(default_factory=list)
    error: str = ""
    holds: list[Hold] = field(default_factory=list)  # empty while a sleep that will be one is on its way
    devices: list[str] = field(default_factory=list)  # assigned to the ranks, by rank
    paused: bool = False  # also while it sleeps
