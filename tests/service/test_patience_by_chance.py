"""Requests at a front end that race sleeps, wakes, cancellations, lost clients, leases and deaths, by chance (G3, G6).

The front end's patience, the coordinator and its in-memory ranks are real, in virtual time; what is behind the gate
is a leader of a few lines. Hypothesis looks for a story in which a request ends in silence, waits for longer than it
may, overtakes another, wakes a model that is held, or leaves something behind.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hypothesis import Phase, example, given, note, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "actors" / "coordinator"))

from coordinator_virtual_time import run
from service_story import LEASE_S, Story

from torpor.actors.coordinator import Fault
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    Kind,
    OnConflict,
    OnExpiry,
    OperationRequest,
    Origin,
)
from torpor.service.gate.policy import WhenClosed


def _operations() -> st.SearchStrategy[OperationRequest]:
    conflict = st.sampled_from(OnConflict)
    drain = st.builds(
        DrainSpec,
        st.sampled_from((DrainMode.FINISH, DrainMode.FREEZE, DrainMode.IF_IDLE)),
        st.sampled_from((None, 1.0)),
    )
    return st.one_of(
        st.builds(
            OperationRequest,
            st.just(Kind.SLEEP),
            st.just("solo"),
            tags=st.sampled_from((None, ("kv_cache",))),
            drain=drain,
            on_conflict=conflict,
            origin=st.sampled_from((Origin.CALLER, Origin.IDLENESS)),
            wake_on_request=st.booleans(),
            lease_s=st.sampled_from((None, LEASE_S)),
            on_expiry=st.sampled_from(OnExpiry),
        ),
        st.builds(
            OperationRequest,
            st.sampled_from((Kind.WAKE, Kind.WAKE, Kind.PAUSE, Kind.UNPAUSE)),
            st.just("solo"),
            on_conflict=conflict,
        ),
    )


_WHICH = st.integers(0, 9)
_PAUSES = st.sampled_from((0.0, 0.0, 0.0005, 0.05, 0.3, 0.3, 2.5, 7.0, 21.0))  # after an act
_ACTS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from((1, 3, 40))),
    st.tuples(st.just("ask"), st.sampled_from((1, 3, 40))),
    st.tuples(st.just("operate"), _operations()),
    st.tuples(st.just("operate"), _operations()),
    st.tuples(st.sampled_from(("go_away", "abort", "cancel", "renew")), _WHICH),
    st.tuples(
        st.just("fault"),
        st.sampled_from(("preflight", "drain", "stage", "commit", "publish")),
        st.sampled_from((Fault.REFUSE, Fault.RAISE, Fault.LOSE)),
    ),
    st.tuples(
        st.just("slow"), st.sampled_from(("drain", "stage", "commit", "publish")), st.sampled_from((0.2, 3.0))
    ),
    st.tuples(st.just("restart"), st.sampled_from((0.0, 1.0, 6.0))),
    st.tuples(st.just("die")),
)


# Who is lost with the leader comes back to a queue that others have filled meanwhile.
_FULL_AGAIN = [
    *[(("ask", 1), 0.0)] * 5,
    (("die",), 0.0),
    *[(("ask", 1), 0.0)] * 4,
    *[(("ask", 1), 0.0005)] * 2,
]


@example(policy=WhenClosed.QUEUE, write_s=0.0, acts=_FULL_AGAIN)
@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    policy=st.sampled_from(WhenClosed),
    write_s=st.sampled_from((0.0, 0.3)),
    acts=st.lists(st.tuples(_ACTS, _PAUSES), min_size=12, max_size=30),
)
def test_requests_that_race_whatever_may_happen_end_as_promised(
    policy: WhenClosed, write_s: float, acts: list[tuple[tuple[Any, ...], float]]
) -> None:
    """G3, G4, G6, F1: each is served, refused in time, ended by an error or gone; nothing of it is left."""
    story = Story(policy, write_s)
    run(story.play(acts))
    note("\n".join(story.broken))
    assert not story.broken
