"""What the tags of a model hold after an operation that has succeeded: as ranks told since, else as must have become."""

from __future__ import annotations

from collections.abc import Collection

from torpor.actors.coordinator.records import WITHOUT_CONTENTS, effective_tags, parked_modes
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
            lost = set(status.undefined_tags) | (_without_contents(status) & wanted)
            undefined |= lost - {"weights"} if _reloaded(run) else lost
    return tuple(sorted(parked)), tuple(sorted(undefined))


def modes_after(runtime: ModelRuntime, run: Run, parked: Collection[str]) -> dict[str, str]:
    """The restore mode of each parked tag. Of a sleep that no rank has told of since, as it was asked for."""
    modes = dict.fromkeys(parked, RestoreMode.PINNED.value)
    if run.request.kind is Kind.SLEEP:
        modes |= runtime.config.restore_modes
        modes |= {tag: mode.value for tag, mode in run.request.restore.items()}
    modes |= parked_modes(runtime.statuses.values())
    return {tag: str(mode) for tag, mode in sorted(modes.items()) if tag in parked}


def paused_after(runtime: ModelRuntime, run: Run) -> bool:
    return {Kind.PAUSE: True, Kind.UNPAUSE: False}.get(run.request.kind, runtime.published.paused)


def version_after(runtime: ModelRuntime, run: Run) -> int:
    """Of the weights. An update says it in its record, too."""
    known = runtime.published.weights_version
    told = [s.weights_version for s in runtime.statuses.values() if s.operation == run.operation.id]
    if run.request.kind is Kind.UPDATE:
        run.operation.weights_version = max(told, default=known + 1)
        return run.operation.weights_version
    # They are the source's again, whatever had been pushed since.
    return max(told, default=0) if _reloaded(run) else known


def _reloaded(run: Run) -> bool:
    return run.machine is not None and run.machine.gathering.reload_bytes > 0


def _without_contents(status: RankStatus) -> set[str]:
    """Tags that sleep with a mode that keeps nothing, of those whose contents a model needs."""
    return {
        str(row["tag"])
        for row in status.memory
        if row.get("parked") and row.get("mode") in WITHOUT_CONTENTS and row["tag"] == "weights"
    }
