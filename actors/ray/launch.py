"""Making the ranks of a model: names, devices, placement, addresses."""

from __future__ import annotations

import asyncio
import os
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from torpor.actors.config import ClusterConfig, ModelConfig, RankSpec
from torpor.actors.coordinator.seating import Seating
from torpor.actors.messages import RestoreMode
from torpor.actors.rank.actor import GROUPS, RankActor
from torpor.actors.ray.calls import call
from torpor.actors.ray.groups import HOST_BUNDLE, NotPlaced, bundles_of, lent_group, make_group, remove_group
from torpor.actors.ray.names import rank_name
from torpor.actors.seats import Wish

LOOPBACK = "127.0.0.1"


class Launcher:
    """Finds, makes and ends the rank actors of a cluster."""

    def __init__(self, config: ClusterConfig, seating: Seating) -> None:
        self._config = config
        self._seating = seating

    def find(self, model: ModelConfig) -> list[ActorHandle | None]:
        """By rank; None where no actor has the name."""
        return [self._find(rank_name(model.name, rank)) for rank in range(model.tensor_parallel)]

    async def create(
        self, model: ModelConfig, epoch: int, parked: Mapping[str, RestoreMode]
    ) -> list[ActorHandle]:
        """Detached actors, not loaded, which refuse coordinators of a lower epoch. Raises NotPlaced.

        parked: tags that sleep as soon as they have loaded.
        """
        cuda, ranks = self.device_kind() == "cuda", range(model.tensor_parallel)
        group = await self._place(model, cuda)
        key = secrets.token_bytes(32)
        specs = [
            replace(self._spec(model, rank, cuda), channel_key=key, epoch=epoch, parked=dict(parked))
            for rank in ranks
        ]
        return [self._create(spec, group) for spec in specs]

    async def load(self, model: ModelConfig, handles: list[ActorHandle]) -> None:
        """Give each rank a device and load all at once. Raises NotSeated, and what the first of them to fail raised."""
        offers = await asyncio.gather(*(call(handle, "offer") for handle in handles))
        seats = await self._seating.take(self._wish(model), offers)
        addresses = ("", "")
        if model.tensor_parallel > 1:
            host = LOOPBACK if len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 1 else None
            addresses = await call(handles[0], "addresses", host)
        loads = (
            call(handle, "load", *addresses, seat.device) for handle, seat in zip(handles, seats, strict=True)
        )
        await asyncio.gather(*loads)

    def remove(self, model: ModelConfig) -> None:
        """End the model's actors and give their place back, unless it was lent."""
        for handle in self.find(model):
            if handle is not None:
                ray.kill(handle)
        remove_group(self._config.namespace, model)
        self._seating.forget(model.name)

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
        return RankSpec(
            model=model,
            rank=rank,
            incarnation=uuid.uuid4().hex,
            device=replace(config.device, kind="cuda" if cuda else self.device_kind()),
            device_index=0,  # the device is chosen when all ranks of the model are there
            host_pool_bytes=config.host_pool.bytes // self._ranks(model),
            node=config.node,
            weights_roots=config.weights_roots,
        )

    def _create(self, spec: RankSpec, group: PlacementGroup) -> ActorHandle:
        model = spec.model
        options = {
            "name": rank_name(model.name, spec.rank),
            "namespace": self._config.namespace,
            "lifetime": "detached",
            "max_restarts": 0,
            "max_task_retries": 0,
            "num_cpus": 0,
            "num_gpus": self._gpus_per_rank(model) if spec.device.kind == "cuda" else 0,
            "concurrency_groups": GROUPS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundles_of(model)[spec.rank]
            ),
        }
        return cast(ActorHandle, ray.remote(**options)(RankActor).remote(spec, self._threads(model)))

    def _models(self, model: ModelConfig) -> list[ModelConfig]:
        """All of them, this one included, which may be newer than the configuration."""
        return [each for each in self._config.models if each.name != model.name] + [model]

    def _ranks(self, model: ModelConfig) -> int:
        return sum(each.tensor_parallel for each in self._models(model))

    def _threads(self, model: ModelConfig) -> int:
        return max(1, len(os.sched_getaffinity(0)) // self._ranks(model))

    def _gpus_per_rank(self, model: ModelConfig) -> float:
        """As configured; else a whole GPU where there are enough, or an equal share for each model of every GPU."""
        if model.gpus_per_rank is not None:
            return model.gpus_per_rank
        if model.placement.group is not None:
            return 0.0
        enough = self._ranks(model) <= ray.cluster_resources().get("GPU", 0)
        return 1.0 if enough else round(1.0 / len(self._models(model)) - 5e-5, 4)

    def _wish(self, model: ModelConfig) -> Wish:
        if self.device_kind() == "host":
            return Wish(model.name)
        share = self._gpus_per_rank(model)
        return Wish(model.name, share, alone=True, given_only=share >= 1 or model.placement.group is not None)

    async def _place(self, model: ModelConfig, cuda: bool) -> PlacementGroup:
        if model.placement.group is not None:
            return lent_group(model)
        gpus = ray.cluster_resources().get("GPU", 0)
        if cuda and model.tensor_parallel > gpus:
            raise NotPlaced(
                f"model {model.name!r} needs {model.tensor_parallel} GPUs, the Ray cluster has {gpus:g}; "
                "lower tensor_parallel, add GPUs, or set device.kind to host"
            )
        bundle = {"GPU": self._gpus_per_rank(model)} if cuda else HOST_BUNDLE
        return await make_group(self._config.namespace, model, bundle, self._config.deadlines.load_s)
