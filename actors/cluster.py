"""Starting a Torpor on this machine, or finding one in a running Ray cluster."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import secrets
import sys
import time
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from torpor.actors.config import ClusterConfig
from torpor.actors.coordinator.actor import CoordinatorActor
from torpor.actors.messages import ModelState, ModelView
from torpor.actors.ports import ControlUnreachable, Loss
from torpor.actors.ray.calls import first_line
from torpor.actors.ray.inference import RayInference
from torpor.actors.ray.knocking import knock
from torpor.actors.ray.names import COORDINATOR, JOURNAL_RESOURCE
from torpor.actors.ray.ports import RayControl
from torpor.actors.ray.raylet import Raylet, raylet_of

OBJECT_STORE_BYTES = 80 << 20  # nothing large goes through it; Ray's least is 75 MiB
SHUTDOWN_S = 30.0
POLL_S = 0.2
KNOCK_S = 5.0
MEET_S = (
    10.0  # for the coordinator and the head to name the leaders; whom they do not is found when he is asked
)
WATCH_S = 0.25
SILENT_SHARE = 0.7  # of Ray's own patience
_RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_HEAD = ("gcs_server", "raylet")  # without these there is no Ray


class NotLoaded(Exception):
    """Models that failed to load, or did not within the time; the text has each one's reason."""


class NoCluster(Exception):
    """There is no Ray cluster to join, or none can be started; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a front end needs. owned: started by this process, and ended with it."""

    control: RayControl
    inference: RayInference
    namespace: str
    owned: bool

    async def wait_until_loaded(self, timeout_s: float = 600.0) -> list[ModelView]:
        """Until every model is past loading. Raises NotLoaded."""
        deadline = time.monotonic() + timeout_s
        views = await self.control.models()
        while any(view.state in _ON_ITS_WAY for view in views) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            views = await self.control.models()
        amiss = [view for view in views if view.state in (*_ON_ITS_WAY, ModelState.FAILED)]
        if amiss:
            raise NotLoaded("; ".join(f"{view.name} is {view.state}: {view.error}" for view in amiss))
        return views

    def has_coordinator(self) -> bool:
        try:
            ray.get_actor(COORDINATOR, self.namespace)
        except ValueError:
            return False
        return True

    def start_coordinator(self, config: ClusterConfig) -> None:
        """For ever, with all models of the configuration. Nothing happens where somebody else was faster."""
        with contextlib.suppress(ValueError):  # the name is taken
            create_coordinator(with_device_name(config))

    def drop_coordinator(self) -> None:
        """One that was started and cannot work; ranks that it may have made stay for the next."""
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(COORDINATOR, self.namespace))

    async def until_lost(self) -> Loss:
        """Until Ray has no head any more, or does not reach this process, which has to start anew then.

        Whoever asks for the coordinator is told.
        """
        if self.owned:
            loss = await _own_head_is_lost()
        else:
            await self._meet_leaders()
            loss = await _joined_is_lost(self.control)
        self.control.give_up(loss.why)
        return loss

    async def _meet_leaders(self) -> None:
        with contextlib.suppress(TimeoutError, ControlUnreachable):
            async with asyncio.timeout(MEET_S):
                await self.inference.meet(view.name for view in await self.control.models())

    def shutdown(self) -> None:
        """End what `start_local` started: coordinator, ranks and the local Ray. A joined cluster goes on."""
        if (
            self.owned and not _head_has_died()
        ):  # who is asked by a dead one waits for minutes; its ranks died with it
            with contextlib.suppress(RayError, ValueError):
                coordinator = ray.get_actor(COORDINATOR, self.namespace)
                ray.get(coordinator.shutdown.remote(), timeout=SHUTDOWN_S)
                ray.kill(coordinator)
        _leave()


_ON_ITS_WAY = (ModelState.LOADING, ModelState.RECOVERING)


def start_local(config: ClusterConfig, environment: MutableMapping[str, str] | None = None) -> Cluster:
    """A Ray of its own on this machine, the coordinator, and ranks that begin to load.

    environment: where Ray's settings are put for it and its processes to find; None = os.environ. Raises NoCluster.
    """
    config = with_device_name(config)
    _quiet_ray(os.environ if environment is None else environment)
    options: dict[str, Any] = {"num_gpus": 0} if config.device.kind == "host" else {}
    try:
        ray.init(
            address="local",
            num_cpus=1,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace=config.namespace,
            resources={JOURNAL_RESOURCE: 1.0},
            **options,
        )
    except Exception as error:  # Ray raises a bare one where its processes are not up in time
        raise NoCluster(
            f"Ray cannot be started on this machine: {first_line(error)} Its logs are under /tmp/ray (or RAY_TMPDIR); "
            "on a busy machine, start again"
        ) from error
    try:
        create_coordinator(config)
    except BaseException:
        ray.shutdown()
        raise
    return _cluster(config.namespace, owned=True)


def with_device_name(config: ClusterConfig) -> ClusterConfig:
    """Host devices of another name are other devices: each cluster has its own, unless told otherwise."""
    name = config.device.name or f"torpor-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    return replace(config, device=replace(config.device, name=name))


def connect(namespace: str = "torpor", address: str = "auto") -> Cluster:
    """Join a Ray cluster that runs. Its token must be in the environment, as Ray wants it. Raises NoCluster."""
    try:
        knock(address)
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise NoCluster(
            f"no Ray cluster can be joined {where} ({first_line(error)}); start one with `ray start --head`, name "
            "its address, and set RAY_AUTH_MODE and RAY_AUTH_TOKEN as it has them"
        ) from error
    return _cluster(namespace, owned=False)


def join(namespace: str = "torpor", address: str = "auto") -> Cluster:
    """As `connect`; a process that is in a Ray cluster already, such as a trainer's, stays in that one."""
    return _cluster(namespace, owned=False) if ray.is_initialized() else connect(namespace, address)


def create_coordinator(config: ClusterConfig) -> None:
    """The one coordinator of the namespace: detached, restarted for ever, where the journal is."""
    marked = ray.cluster_resources().get(JOURNAL_RESOURCE, 0) > 0
    ray.remote(
        name=COORDINATOR,
        namespace=config.namespace,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=10_000,
        num_cpus=0,
        **journal_node(marked, ray.get_runtime_context().get_node_id()),
    )(CoordinatorActor).remote(config, uuid.uuid4().hex)


def journal_node(marked: bool, here: str) -> dict[str, Any]:
    """Options that keep the coordinator where its journal is, also when Ray restarts it.

    marked: some node has the resource for it. Else it is this node (here: its id), until the node ends.
    """
    if marked:
        return {"resources": {JOURNAL_RESOURCE: 0.001}}
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}


def _head_has_died() -> bool:
    """Whether of the Ray that this process has started something is gone that it cannot be without."""
    node = ray._private.worker._global_node
    return node is not None and any(kind in _HEAD for kind, _ in node.dead_processes())


async def _own_head_is_lost() -> Loss:
    while not _head_has_died():  # noqa: ASYNC110  # processes are asked, not told of
        await asyncio.sleep(WATCH_S)
    return Loss(
        "Ray's head, which this service had started, has died, and the models with it; start the service again: "
        "they come back as they were last published."
    )


async def _joined_is_lost(control: RayControl) -> Loss:
    raylet = await asyncio.to_thread(raylet_of, ray.get_runtime_context().get_node_id())
    patience_s = SILENT_SHARE * float(os.environ.get(_RAYS_PATIENCE, "60"))
    return await joined_is_lost(control, raylet, patience_s)


async def joined_is_lost(control: RayControl, raylet: Raylet | None, patience_s: float) -> Loss:
    """patience_s: less than Ray's own, which at its end ends this process without a word.

    Without its raylet a front end serves awake models on, and nobody could start another one while the head is
    silent: so it waits for the head.
    """
    heard_s = time.monotonic()
    while time.monotonic() - heard_s < patience_s:
        await asyncio.sleep(KNOCK_S)
        if not await control.head_answers():
            continue
        if raylet is None or not raylet.lives:
            return Loss(
                "the raylet by which this front end was in Ray's cluster has died, and so it does not hear of the "
                "coordinator any more; start it again.",
                serves_on=True,
            )
        heard_s = time.monotonic()
    return Loss(
        f"Ray's head has not answered for {patience_s:g} s; see to it that it runs, and start this front end again."
    )


def _leave() -> None:
    """Ray asks a dead head to let it go, for half a minute, also when the process ends; without one it is not asked."""
    node = ray._private.worker._global_node
    if node is not None and _head_has_died():
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        atexit.register(_end_at_once)  # what was registered last runs first
        return
    ray.shutdown()


def _end_at_once() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def _cluster(namespace: str, owned: bool) -> Cluster:
    control = RayControl(namespace)
    return Cluster(control, RayInference(namespace, control), namespace, owned)


def _quiet_ray(environment: MutableMapping[str, str]) -> None:
    # With no mode set, Ray would write a token file into the home folder. A token of our own, unless one is set,
    # keeps other users of this machine out and leaves nothing behind.
    if "RAY_AUTH_MODE" not in environment:
        environment["RAY_AUTH_MODE"] = "token"
        environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        Config.initialize("")  # Ray has read the mode when it was imported: have it look again
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
