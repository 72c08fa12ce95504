"""What coordinator and ranks say to each other: calls of phases, their answers, and how a rank is. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torpor.actors.words import GateReason, Kind, LedgerPhase, Phase, RejectCode


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
    host_idle_bytes: int = 0  # beside those: kept for the next sleep
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
    device_kernels: str = ""  # "loaded", or why a GPU's small copies go without kernels of our own
    staged_digest: str = ""  # as the stage of `operation` answered, while ledger_phase is staged
