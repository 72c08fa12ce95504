"""Placement groups: a detached one of a model's own, or one that somebody lends by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from torpor.actors.config import ModelConfig
from torpor.actors.ray.names import group_name

# A bundle must ask for something. So little is there on every node that runs anything at all.
HOST_BUNDLE = {"CPU": 0.001}
_GONE = "REMOVED"


class NotPlaced(Exception):
    """The cluster has no room for a model's ranks; the text says what is missing."""


def bundles_of(model: ModelConfig) -> tuple[int, ...]:
    """Which bundle of its group each rank is in."""
    return model.placement.bundles or tuple(range(model.tensor_parallel))


async def make_group(
    namespace: str, model: ModelConfig, bundle: dict[str, float], timeout_s: float
) -> PlacementGroup:
    """One bundle a rank, on as few nodes as can be. Not the creator's, which comes and goes. Raises NotPlaced."""
    remove_group(namespace, model)  # a coordinator that died while it made the ranks leaves one
    name = group_name(namespace, model.name)
    bundles = [bundle] * model.tensor_parallel
    group = placement_group(bundles, strategy="PACK", name=name, lifetime="detached")
    try:
        await asyncio.wait_for(group.ready(), timeout_s)
    except TimeoutError:
        remove_placement_group(group)
        needs = ", ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
        raise NotPlaced(
            f"no place for model {model.name!r} within {timeout_s:g} s: {model.tensor_parallel} times {needs} are "
            "not free in the Ray cluster; free some, add nodes, or lower gpus_per_rank or tensor_parallel"
        ) from None
    return group


def lent_group(model: ModelConfig) -> PlacementGroup:
    """The group that the model's placement names, whoever made it, in whichever namespace. Raises NotPlaced."""
    name = model.placement.group
    assert name is not None
    found = _find(name)
    if len(found) != 1:
        what = "there is no placement group" if not found else f"there are {len(found)} placement groups"
        raise NotPlaced(
            f"model {model.name!r}: {what} named {name!r} in the Ray cluster; make it first, with this name and no "
            "other's (placement_group(…, name=…)), or leave placement.group out"
        )
    (group, bundles), last = found[0], max(bundles_of(model))
    if last >= bundles:
        raise NotPlaced(
            f"model {model.name!r}: placement group {name!r} has bundles 0 to {bundles - 1}, and bundle {last} is "
            "wanted; correct placement.bundles or lower tensor_parallel"
        )
    return group


def remove_group(namespace: str, model: ModelConfig) -> None:
    """The model's own, if it has one. What was lent stays."""
    for group, _ in _find(group_name(namespace, model.name)):
        remove_placement_group(group)


def _find(name: str) -> Sequence[tuple[PlacementGroup, int]]:
    """Groups of this name, with their number of bundles. Ray's own look-up sees one namespace only."""
    table = placement_group_table()
    return [
        (
            PlacementGroup(ray.PlacementGroupID(bytes.fromhex(each["placement_group_id"]))),
            len(each["bundles"]),
        )
        for each in table.values()
        if each["name"] == name and each["state"] != _GONE
    ]
