"""Where ranks are put: detached groups of their own or lent ones, and the devices that the coordinator assigns."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from dataclasses import replace

import pytest
import ray
from ranks.torpors import MakeTorpor, Torpor, until
from ray.util import placement_group, placement_group_table, remove_placement_group

from torpor.actors.config import ClusterConfig, PlacementConfig
from torpor.actors.messages import ModelState


def groups(name: str) -> list[dict[str, object]]:
    """As Ray's head tells of those that are there."""
    return [
        each
        for each in placement_group_table().values()
        if each["name"] == name and each["state"] == "CREATED"
    ]


def own_group(torpor: Torpor, model: str) -> str:
    return f"torpor-group:{torpor.config.namespace}:{model}"


def lending(name: str, *bundles: int) -> PlacementConfig:
    return PlacementConfig(name, bundles or None)


async def test_models_get_devices_and_groups_of_their_own_which_outlive_the_coordinator(
    make_torpor: MakeTorpor,
) -> None:
    def two_devices(config: ClusterConfig) -> ClusterConfig:
        return replace(config, device=replace(config.device, count=2))

    torpor = await make_torpor(models=("one", "two"), adapt=two_devices).loaded()
    views = {view.name: view for view in await torpor.control.models(detail=True)}
    taken = {name: view.devices for name, view in views.items()}
    assert sorted(taken["one"] + taken["two"]) == [f"host:{torpor.device_name(index)}" for index in (0, 1)]
    for name, view in views.items():
        assert [rank.device_id for rank in view.ranks] == taken[name], "assigned, and really taken"
        (group,) = groups(own_group(torpor, name))
        assert len(group["bundles"]) == 1

    os.kill(await torpor.coordinator().pid.remote(), signal.SIGKILL)
    again = {
        view.name: view for view in await until(lambda: torpor.control.models(detail=True), all_awake, 30)
    }
    assert {name: view.devices for name, view in again.items()} == taken
    assert [view.ranks[0].pid for view in again.values()] == [view.ranks[0].pid for view in views.values()]


def all_awake(views: list) -> bool:  # type: ignore[type-arg]
    return all(view.state is ModelState.AWAKE and view.devices for view in views)


async def test_a_lent_group_is_used_by_bundle_and_stays_when_the_model_goes(make_torpor: MakeTorpor) -> None:
    """Another job's, e.g. a trainer's; only the model's own group goes with the model."""
    name = f"trainers-{os.getpid()}"
    group = placement_group([{"CPU": 0.1}, {"CPU": 0.1}], name=name)
    await asyncio.wait_for(group.ready(), 30)

    def in_the_second(config: ClusterConfig) -> ClusterConfig:
        borrower = replace(config.models[0], placement=lending(name, 1))
        return replace(config, models=(borrower, config.models[1]))

    torpor = await make_torpor(models=("borrower", "owner"), adapt=in_the_second).loaded()
    assert not groups(own_group(torpor, "borrower"))
    assert groups(own_group(torpor, "owner"))
    inside = await torpor.rank("borrower", 0).__ray_call__.remote(
        lambda _: ray.util.get_current_placement_group().id
    )
    assert inside == group.id
    await torpor.coordinator().shutdown.remote()
    assert not groups(own_group(torpor, "owner"))
    assert groups(name)
    remove_placement_group(group)


@pytest.mark.parametrize(
    ("lent", "says"),
    [
        (lending("nobodys"), "there is no placement group named 'nobodys'.*make it first"),
        (lending("small", 3), "has bundles 0 to 0, and bundle 3 is wanted; correct placement.bundles"),
    ],
)
async def test_a_group_that_cannot_be_used_fails_the_model_with_what_to_do(
    make_torpor: MakeTorpor, lent: PlacementConfig, says: str
) -> None:
    group = placement_group([{"CPU": 0.1}], name="small")
    await asyncio.wait_for(group.ready(), 30)
    torpor = make_torpor(
        adapt=lambda config: replace(config, models=(replace(config.models[0], placement=lent),))
    )
    view = await torpor.until(lambda view: view.state is ModelState.FAILED)
    remove_placement_group(group)
    assert re.search(says, view.error), view.error
