"""The words of operations, models and gates: kinds, states, phases and reasons. Nothing here does anything."""

from __future__ import annotations

from enum import StrEnum


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


class LedgerPhase(StrEnum):
    IDLE = "idle"
    STAGED = "staged"
    COMMITTING = "committing"
    COMMITTED = "committed"
