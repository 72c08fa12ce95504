"""What becomes of an operation that a coordinator left behind: the in-doubt table, in pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from torpor.actors.coordinator.steps import RELOAD
from torpor.actors.messages import LedgerPhase, RankStatus


class Judgement(StrEnum):
    FORWARD = "forward"  # commit, then publish
    ABORT = "abort"


_COMMITTING = (LedgerPhase.COMMITTING, LedgerPhase.COMMITTED)


def judge(operation: str, decided: bool, statuses: Mapping[int, RankStatus]) -> Judgement:
    """statuses: of the ranks that are there; the others are gone.

    One committed rank proves a decision, even where the journal has lost it. A decision that no rank has
    anything staged for was never told to anyone (writing it failed in the end), or ended with its ranks.
    """
    ours = [status for status in statuses.values() if status.operation == operation]
    if any(status.ledger_phase in _COMMITTING or status.ledger_phase is LedgerPhase.IDLE for status in ours):
        return Judgement.FORWARD
    # A rank that has nothing staged was told to abort: the writing was called failed, and is there all the same.
    staged = len(ours) == len(statuses) and all(status.ledger_phase is LedgerPhase.STAGED for status in ours)
    return Judgement.FORWARD if decided and ours and staged else Judgement.ABORT


def in_doubt(statuses: Mapping[int, RankStatus]) -> list[str]:
    """Operations that some rank has begun and not ended, whatever the journal says of them.

    One whose stage the leader refused has left nothing but a closed gate, which is to be released, too.
    """
    found = [
        operation
        for status in statuses.values()
        for operation in (
            status.operation if status.ledger_phase is not LedgerPhase.IDLE else None,
            status.staging,
            # Of one that was committed here last the phase says what is left to do.
            status.gate_operation if status.gate_operation != status.operation else None,
        )
        if operation is not None
    ]
    return list(dict.fromkeys(found))


def disagreement(statuses: Mapping[int, RankStatus]) -> str:
    """Why these ranks cannot serve as one model; empty when they can."""
    parked = {rank: status.parked_tags for rank, status in statuses.items()}
    if len({tuple(sorted(tags)) for tags in parked.values()}) > 1:
        told = "; ".join(
            f"rank {rank}: {', '.join(tags) or 'nothing'}" for rank, tags in sorted(parked.items())
        )
        return f"the ranks have different tags parked ({told}); {RELOAD}"
    versions = {rank: status.weights_version for rank, status in statuses.items()}
    if len(set(versions.values())) > 1:
        told = "; ".join(f"rank {rank}: {version}" for rank, version in sorted(versions.items()))
        return f"the ranks have different versions of the weights ({told}); {RELOAD}"
    return ""
