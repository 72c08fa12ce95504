"""Making the ranks of a model: names, devices, placement, addresses."""

from __future__ import annotations

import asyncio
import os
import secrets
import uuid
from dataclasses import replace
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from torpor.actors.config import ClusterConfig, ModelConfig, RankSpec
from torpor.actors.rank.actor import GROUPS, RankActor
from torpor.actors.ray.calls import call
from torpor.actors.ray.names import group_name, rank_name

LOOPBACK = "127.0.0.1"


class NotPlaced(Exception):
    """The cluster has no room for a model's ranks; the text says what is missing."""


class Launcher:
    """Finds, makes and ends the rank actors of a cluster."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config

    def find(self, model: ModelConfig) -> list[ActorHandle | None]:
        """By rank; None where no actor has the name."""
        return [self._find(rank_name(model.name, rank)) for rank in range(model.tensor_parallel)]

    async def create(self, model: ModelConfig, epoch: int) -> list[ActorHandle]:
        """Detached actors, not loaded, which refuse coordinators of a lower epoch. Raises NotPlaced."""
        cuda, ranks = self.device_kind() == "cuda", range(model.tensor_parallel)
        group = await self._place(model) if cuda else None
        key = secrets.token_bytes(32)
        specs = [replace(self._spec(model, rank, cuda), channel_key=key, epoch=epoch) for rank in ranks]
        return [self._create(spec, group) for spec in specs]

    async def load(self, model: ModelConfig, handles: list[ActorHandle]) -> None:
        """Load all ranks at once. Raises what the first of them to fail raised."""
        addresses = ("", "")
        if model.tensor_parallel > 1:
            host = LOOPBACK if len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 1 else None
            addresses = await call(handles[0], "addresses", host)
        await asyncio.gather(*(call(handle, "load", *addresses) for handle in handles))

    def remove(self, model: ModelConfig) -> None:
        """End the model's actors and give their place back."""
        for handle in self.find(model):
            if handle is not None:
                ray.kill(handle)
        try:
            remove_placement_group(get_placement_group(group_name(model.name)))
        except ValueError:
            return  # it has none

    def device_kind(self) -> str:
        """What `auto` comes to: cuda where the cluster has GPUs."""
        kind = self._config.device.kind
        if kind != "auto":
            return kind
        return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "host"

    def _find(self, name: str) -> ActorHandle | None:
        try:
            return ray.get_actor(name, self._config.namespace)
        except ValueError:
            return None

    def _spec(self, model: ModelConfig, rank: int, cuda: bool) -> RankSpec:
        config = self._config
        ranks = sum(each.tensor_parallel for each in config.models)
        return RankSpec(
            model=model,
            rank=rank,
            incarnation=uuid.uuid4().hex,
            device=replace(config.device, kind="cuda" if cuda else self.device_kind()),
            device_index=0 if cuda else rank % config.device.count,  # Ray shows a rank its own GPU only
            host_pool_bytes=config.host_pool.bytes // ranks,
        )

    def _create(self, spec: RankSpec, group: PlacementGroup | None) -> ActorHandle:
        options = {
            "name": rank_name(spec.model.name, spec.rank),
            "namespace": self._config.namespace,
            "lifetime": "detached",
            "max_restarts": 0,
            "max_task_retries": 0,
            "num_cpus": 0,
            "concurrency_groups": GROUPS,
        }
        if group is not None:
            options["num_gpus"] = self._gpus_per_rank()
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=spec.rank
            )
        return cast(ActorHandle, ray.remote(**options)(RankActor).remote(spec, self._threads()))

    def _threads(self) -> int:
        ranks = sum(model.tensor_parallel for model in self._config.models)
        return max(1, len(os.sched_getaffinity(0)) // ranks)

    def _gpus_per_rank(self) -> float:
        """A whole GPU where there are enough; else each model has a share of every GPU."""
        ranks = sum(model.tensor_parallel for model in self._config.models)
        gpus = ray.cluster_resources().get("GPU", 0)
        return 1.0 if ranks <= gpus else round(1.0 / len(self._config.models) - 5e-5, 4)

    async def _place(self, model: ModelConfig) -> PlacementGroup:
        gpus = ray.cluster_resources().get("GPU", 0)
        if model.tensor_parallel > gpus:
            raise NotPlaced(
                f"model {model.name!r} needs {model.tensor_parallel} GPUs, the Ray cluster has {gpus:g}; "
                "lower tensor_parallel, add GPUs, or set device.kind to host"
            )
        bundles = [{"GPU": self._gpus_per_rank()}] * model.tensor_parallel
        group = placement_group(bundles, strategy="PACK", name=group_name(model.name), lifetime="detached")
        try:
            await asyncio.wait_for(group.ready(), self._config.deadlines.load_s)
        except TimeoutError:
            remove_placement_group(group)
            raise NotPlaced(
                f"no place for model {model.name!r} within {self._config.deadlines.load_s:g} s: "
                f"{model.tensor_parallel} times {bundles[0]['GPU']:g} GPU are not free in the Ray cluster"
            ) from None
        return group
