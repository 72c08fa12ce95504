"""How things are called in the cluster. One namespace holds one Torpor."""

from __future__ import annotations

COORDINATOR = "torpor-coordinator"
NOBODY = "torpor-nobody"  # no actor is ever called so
JOURNAL_RESOURCE = "torpor_journal"  # a node that has it holds the journal, and so the coordinator


def rank_name(model: str, rank: int) -> str:
    return f"torpor-rank:{model}:{rank}"


def group_name(namespace: str, model: str) -> str:
    """The namespace is part of it: Ray keeps groups by the namespace of the job that made them, which may differ."""
    return f"torpor-group:{namespace}:{model}"
