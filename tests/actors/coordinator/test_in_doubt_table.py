"""What becomes of an operation in doubt, row by row, in the pure functions (the in-doubt table, M6)."""

from __future__ import annotations

import pytest

from torpor.actors.coordinator.judge import Judgement, disagreement, in_doubt, judge
from torpor.actors.messages import (
    Kind,
    LedgerPhase,
    RankStatus,
)


def status(
    rank: int, phase: LedgerPhase, operation: str | None = "op", parked: tuple[str, ...] = ()
) -> RankStatus:
    return RankStatus(
        model="chat",
        rank=rank,
        incarnation="one",
        node="n",
        pid=1,
        epoch=1,
        loaded=True,
        ledger_phase=phase,
        operation=operation,
        kind=Kind.SLEEP,
        tags=("weights",),
        parked_tags=parked,
        undefined_tags=(),
        device_kind="host",
        device_id="d",
        device_free_bytes=1,
        device_total_bytes=1,
    )


IDLE, STAGED = (LedgerPhase.IDLE, None), (LedgerPhase.STAGED, "op")
COMMITTING, COMMITTED = (LedgerPhase.COMMITTING, "op"), (LedgerPhase.COMMITTED, "op")
PUBLISHED, OTHER = (LedgerPhase.IDLE, "op"), (LedgerPhase.STAGED, "another")


@pytest.mark.parametrize(
    ("ranks", "decided", "expected"),
    [
        ([IDLE, IDLE], False, Judgement.ABORT),
        ([STAGED, IDLE], False, Judgement.ABORT),
        ([STAGED, STAGED], False, Judgement.ABORT),
        ([STAGED, STAGED], True, Judgement.FORWARD),
        ([STAGED, IDLE], True, Judgement.ABORT),  # an abort had begun
        ([STAGED, COMMITTED], True, Judgement.FORWARD),
        ([STAGED, COMMITTED], False, Judgement.FORWARD),
        ([STAGED, COMMITTING], False, Judgement.FORWARD),
        ([STAGED, PUBLISHED], False, Judgement.FORWARD),
        ([PUBLISHED, PUBLISHED], True, Judgement.FORWARD),
        ([IDLE, IDLE], True, Judgement.ABORT),
        ([OTHER, OTHER], False, Judgement.ABORT),
    ],
)
def test_the_in_doubt_table(
    ranks: list[tuple[LedgerPhase, str | None]], decided: bool, expected: Judgement
) -> None:
    statuses = {rank: status(rank, *state) for rank, state in enumerate(ranks)}
    assert judge("op", decided, statuses) is expected


def test_what_ranks_hold_is_in_doubt_and_ranks_that_differ_cannot_serve() -> None:
    assert in_doubt({0: status(0, *STAGED), 1: status(1, *OTHER), 2: status(2, *PUBLISHED)}) == [
        "op",
        "another",
    ]
    assert disagreement({0: status(0, *IDLE), 1: status(1, *IDLE)}) == ""
    told = disagreement({0: status(0, *IDLE, parked=("weights",)), 1: status(1, *IDLE)})
    assert "rank 0: weights; rank 1: nothing" in told and "recover the model" in told
