"""What has to be done so that a cluster is as a file says. Pure: two configurations in, steps out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from torpor.actors.changes import Difference, changed, differences
from torpor.actors.config import ClusterConfig, ModelConfig
from torpor.service.settings.shape import Settings


class Action(StrEnum):
    CREATE = "create"
    RECREATE = "recreate"  # its shape differs: deleted, and made anew
    CHANGE = "change"  # its policies differ: changed in place, its ranks are not touched
    KEEP = "keep"
    PRUNE = "prune"  # not in the file: deleted
    LEAVE = "leave"  # not in the file, and nobody asked to prune


@dataclass(frozen=True, slots=True)
class Step:
    """model: as wanted; for prune and leave, as it is."""

    action: Action
    model: ModelConfig
    differences: tuple[Difference, ...] = ()

    @property
    def deletes(self) -> bool:
        return self.action in (Action.RECREATE, Action.PRUNE)

    @property
    def creates(self) -> bool:
        return self.action in (Action.CREATE, Action.RECREATE)


@dataclass(frozen=True, slots=True)
class Plan:
    """fixed: settings of the cluster that the file wants otherwise, and that no apply can change."""

    steps: tuple[Step, ...]
    fixed: tuple[Difference, ...] = ()


def make_plan(current: ClusterConfig | None, wanted: ClusterConfig, settings: Settings, prune: bool) -> Plan:
    """current None: there is no coordinator yet. settings: what `wanted` was made of, to know what the file sets."""
    there = {model.name: model for model in current.models} if current is not None else {}
    names = {model.name for model in wanted.models}
    steps = [_step(there.get(model.name), model) for model in wanted.models]
    extra = Action.PRUNE if prune else Action.LEAVE
    steps += [Step(extra, model) for name, model in there.items() if name not in names]
    return Plan(tuple(steps), () if current is None else _fixed(current, wanted, settings))


def _step(current: ModelConfig | None, wanted: ModelConfig) -> Step:
    if current is None:
        return Step(Action.CREATE, wanted)
    found = tuple(differences(current, wanted))
    if not found:
        return Step(Action.KEEP, wanted)
    in_place = all(difference.in_place for difference in found)
    return Step(Action.CHANGE if in_place else Action.RECREATE, wanted, found)


# Settings of the cluster as the file calls them, and where ClusterConfig has them.
_FIXED = {
    "device.kind": "device.kind",
    "device.count": "device.count",
    "device.host_capacity": "device.host_capacity_bytes",
    "device.name": "device.name",
    "node.host_bytes": "node.host_bytes",
    "node.disk_bytes": "node.disk_bytes",
    "node.disk_path": "node.disk_path",
    "host_pool.bytes": "host_pool.bytes",
    "host_pool.prefill": "host_pool.prefill",
    "journal.path": "journal_path",
    "weights_roots": "weights_roots",
}


def _fixed(current: ClusterConfig, wanted: ClusterConfig, settings: Settings) -> tuple[Difference, ...]:
    told = _told(settings.model_dump(exclude_unset=True, exclude_none=True))
    keys = {_FIXED.get(key, key): key for key in told if key in _FIXED or key.startswith("deadlines.")}
    found = changed(_without_models(current), _without_models(wanted))
    return tuple(Difference(keys[each.key], each.old, each.new) for each in found if each.key in keys)


def _without_models(config: ClusterConfig) -> dict[str, Any]:
    tree = asdict(config)
    del tree["models"]
    return tree


def _told(tree: Mapping[str, Any]) -> set[str]:
    """Dotted keys that the file, or the environment, has set."""
    sections = {name: section for name, section in tree.items() if isinstance(section, Mapping)}
    plain = {name for name in tree if name not in sections}
    return plain | {f"{name}.{key}" for name, section in sections.items() for key in section}


def plan_json(plan: Plan) -> dict[str, Any]:
    """{steps: [{model, action, tensor_parallel, differences}], fixed: [{key, old, new}]}"""
    steps = [
        {
            "model": step.model.name,
            "action": step.action,
            "tensor_parallel": step.model.tensor_parallel,
            "differences": [asdict(each) for each in step.differences],
        }
        for step in plan.steps
    ]
    return {"steps": steps, "fixed": [asdict(each) for each in plan.fixed]}
