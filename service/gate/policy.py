"""What a front end does at a closed gate, by the model's policy and the gate's reason. Data."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from torpor.actors.messages import GateReason, ModelState, ModelView
from torpor.actors.ports import GateClosed


class WhenClosed(StrEnum):
    """models.*.gate.when_closed"""

    REJECT = "reject"
    QUEUE = "queue"
    WAKE = "wake"


class Answer(StrEnum):
    REFUSE = "refuse"
    WAIT = "wait"
    WAKE = "wake"
    WAIT_BRIEFLY = "wait_briefly"  # whether the model comes back will soon be known


_QUEUE: Mapping[str, Answer] = {
    **{str(reason): Answer.WAIT for reason in GateReason},
    GateReason.FAILED: Answer.WAIT_BRIEFLY,
}
POLICIES: Mapping[WhenClosed, Mapping[str, Answer]] = {
    WhenClosed.REJECT: {},
    WhenClosed.QUEUE: _QUEUE,
    # What a person must end is not waited for.
    WhenClosed.WAKE: {
        **_QUEUE,
        GateReason.ASLEEP: Answer.WAKE,
        GateReason.PAUSED: Answer.REFUSE,
        GateReason.CONTENTS_UNDEFINED: Answer.REFUSE,
    },
}
# Under a hold these do not end by themselves. A hold that is being woken does.
_HELD = (GateReason.ASLEEP, GateReason.SLEEPING, GateReason.DRAINING)


def answer(policy: WhenClosed, view: ModelView) -> Answer:
    """To a closed gate, as the coordinator shows it; a policy that wakes refuses under a hold (G6)."""
    if policy is WhenClosed.WAKE and view.hold and view.gate_reason in _HELD:
        return Answer.REFUSE
    return POLICIES[policy].get(str(view.gate_reason), Answer.REFUSE)


def refused(view: ModelView) -> GateClosed:
    """Why, as far as the model tells."""
    holders = ", ".join(hold.by for hold in view.holds if hold.by)
    detail = f"held asleep by {holders}" if holders else ""
    if view.hold and view.state is ModelState.SLEEPING:
        detail = "it is being put to sleep on purpose"
    return GateClosed(view.gate_reason or GateReason.FAILED, detail or view.error)


class NotLetIn(GateClosed):
    """It could not wait, or waited in vain. full: as many waited as may; else its time was over."""

    def __init__(self, reason: str, detail: str, full: bool) -> None:
        super().__init__(reason, detail)
        self.full = full
