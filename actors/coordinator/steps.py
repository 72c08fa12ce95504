"""The steps of an operation, and the events that move it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torpor.actors.messages import Phase, PhaseReply, RankStatus, Refusal

# What to do about a failed model, for people.
RELOAD = "recover the model to load it anew"


class Step(StrEnum):
    PREFLIGHT = "preflight"  # what each rank would do, and how it is: its incarnation, node and device, what is parked
    RESERVE = "reserve"  # bytes, against the budgets
    DRAIN = "drain"
    LOCK = "lock"  # take turns on shared devices
    STAGE = "stage"
    DOUBT = "doubt"  # a stage was not answered in time: ask what became of it
    DECIDE = "decide"  # the decision is on its way to the disk
    COMMIT = "commit"
    PUBLISH = "publish"  # followers; all, where the leader's gate stays closed anyhow
    OPEN = "open"  # then the leader, whose gate opens last
    WITHDRAW = "withdraw"  # take back a preflight or a drain
    ABORT = "abort"  # take back a stage: followers
    REOPEN = "reopen"  # then the leader, whose gate must not open while a follower is staged
    DONE = "done"


# What ranks and people see of it.
PHASE_OF: dict[Step, Phase] = {
    Step.PREFLIGHT: Phase.PREFLIGHT,
    Step.RESERVE: Phase.PREFLIGHT,
    Step.DRAIN: Phase.DRAIN,
    Step.LOCK: Phase.STAGE,
    Step.STAGE: Phase.STAGE,
    Step.DOUBT: Phase.STAGE,
    Step.DECIDE: Phase.COMMIT,
    Step.COMMIT: Phase.COMMIT,
    Step.PUBLISH: Phase.PUBLISH,
    Step.OPEN: Phase.PUBLISH,
    Step.WITHDRAW: Phase.PREFLIGHT,
    Step.ABORT: Phase.STAGE,
    Step.REOPEN: Phase.STAGE,
}


@dataclass(frozen=True, slots=True)
class Told:
    """A rank answered `status`."""

    step: Step
    rank: int
    status: RankStatus


@dataclass(frozen=True, slots=True)
class Replied:
    step: Step
    rank: int
    reply: PhaseReply


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank raised."""

    step: Step
    rank: int
    error: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The rank's process is gone: it will never answer."""

    step: Step
    rank: int
    error: str


@dataclass(frozen=True, slots=True)
class Settled:
    """The coordinator's own part of a step (reserve, lock, decide) is over; a refusal says why it failed."""

    step: Step
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Expired:
    """The step's deadline has passed."""

    step: Step


@dataclass(frozen=True, slots=True)
class Cancel:
    step: None = None


Event = Told | Replied | Failed | Gone | Settled | Expired | Cancel
