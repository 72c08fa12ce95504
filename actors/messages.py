"""The messages that coordinator, ranks and front doors share, and all their words. Nothing here does anything.

Durations are seconds, sizes bytes, instants Unix time. What is sent is plain data, so that it crosses Ray, SQLite
and HTTP alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# In files of their own, and known by this one.
from torpor.actors.generation import AbortOrder as AbortOrder
from torpor.actors.generation import Admission as Admission
from torpor.actors.generation import AdmissionReply as AdmissionReply
from torpor.actors.generation import FinishReason as FinishReason
from torpor.actors.generation import GenerateRequest as GenerateRequest
from torpor.actors.generation import Sampling as Sampling
from torpor.actors.generation import TokenEvent as TokenEvent
from torpor.actors.generation import TokenLogprob as TokenLogprob
from torpor.actors.rank_messages import EngineChoices as EngineChoices
from torpor.actors.rank_messages import PhaseCall as PhaseCall
from torpor.actors.rank_messages import PhaseReply as PhaseReply
from torpor.actors.rank_messages import RankStatus as RankStatus
from torpor.actors.rank_messages import Refusal as Refusal
from torpor.actors.rank_messages import Trimmed as Trimmed
from torpor.actors.wishes import DrainMode as DrainMode
from torpor.actors.wishes import DrainSpec as DrainSpec
from torpor.actors.wishes import MakeRoom as MakeRoom
from torpor.actors.wishes import OnConflict as OnConflict
from torpor.actors.wishes import OnDiscard as OnDiscard
from torpor.actors.wishes import OnExpiry as OnExpiry
from torpor.actors.wishes import RestoreMode as RestoreMode
from torpor.actors.words import GateReason as GateReason
from torpor.actors.words import Kind as Kind
from torpor.actors.words import LedgerPhase as LedgerPhase
from torpor.actors.words import ModelState as ModelState
from torpor.actors.words import OperationState as OperationState
from torpor.actors.words import Origin as Origin
from torpor.actors.words import Phase as Phase
from torpor.actors.words import RankOutcome as RankOutcome
from torpor.actors.words import RejectCode as RejectCode


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
