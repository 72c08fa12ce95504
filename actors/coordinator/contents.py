"""What the tags of a model hold after an operation that has succeeded: as ranks told since, else as must have become."""

from __future__ import annotations

from torpor.actors.coordinator.records import effective_tags
from torpor.actors.coordinator.runtime import ModelRuntime, Run
from torpor.actors.messages import Kind, RankStatus, RestoreMode


def contents_after(runtime: ModelRuntime, run: Run) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(parked, undefined) tags."""
    wanted = set(effective_tags(run.request, runtime.published.tags))
    parked: set[str] = set()
    undefined: set[str] = set()
    for status in runtime.statuses.values():
        if status.operation == run.operation.id or (run.machine and run.machine.noop):
            parked |= set(status.parked_tags)
            undefined |= set(status.undefined_tags)
        elif run.request.kind is Kind.SLEEP:
            parked |= set(status.parked_tags) | wanted
            undefined |= set(status.undefined_tags) - wanted
        elif run.request.kind is Kind.UPDATE:
            parked |= set(status.parked_tags)
            undefined |= set(status.undefined_tags) - wanted
        else:
            parked |= set(status.parked_tags) - wanted
            undefined |= set(status.undefined_tags) | (_without_contents(status) & wanted)
    return tuple(sorted(parked)), tuple(sorted(undefined))


def paused_after(runtime: ModelRuntime, run: Run) -> bool:
    return {Kind.PAUSE: True, Kind.UNPAUSE: False}.get(run.request.kind, runtime.published.paused)


def version_after(runtime: ModelRuntime, run: Run) -> int:
    """Of the weights."""
    known = runtime.published.weights_version
    if run.request.kind is not Kind.UPDATE:
        return known
    told = [s.weights_version for s in runtime.statuses.values() if s.operation == run.operation.id]
    run.operation.weights_version = max(told, default=known + 1)
    return run.operation.weights_version


def _without_contents(status: RankStatus) -> set[str]:
    """Tags that sleep with a mode that keeps nothing, of those whose contents a model needs."""
    lost = (RestoreMode.NONE.value, RestoreMode.MEMSET.value)
    return {str(row["tag"]) for row in status.memory if row.get("mode") in lost and row["tag"] == "weights"}
