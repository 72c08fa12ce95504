"""A Torpor with toy engines on real Ray, and short words for what tests ask of it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import ray

from torpor.actors.cluster import Cluster, create_coordinator
from torpor.actors.config import ClusterConfig, EngineConfig
from torpor.actors.messages import (
    GenerateRequest,
    Kind,
    ModelState,
    ModelView,
    Operation,
    OperationRequest,
    OperationState,
    Sampling,
    TokenEvent,
)
from torpor.actors.ports import Inference
from torpor.actors.ray.inference import RayInference
from torpor.actors.ray.names import COORDINATOR
from torpor.actors.ray.ports import RayControl
from torpor.native import Device

T = TypeVar("T")
MIB = 1 << 20
CAPACITY_BYTES = 128 * MIB
ENGINE = EngineConfig(kind="ranks.toys:make_engine")


@dataclass(frozen=True)
class Torpor:
    """A Torpor in its namespace: its front doors, and where its devices are."""

    cluster: Cluster
    config: ClusterConfig

    @property
    def control(self) -> RayControl:
        assert isinstance(self.cluster.control, RayControl)
        return self.cluster.control

    def device_name(self, index: int) -> str:
        return f"{self.config.device.name}-{index}"

    def rank(self, model: str, rank: int) -> ray.actor.ActorHandle:
        return ray.get_actor(f"torpor-rank:{model}:{rank}", self.config.namespace)

    def coordinator(self) -> ray.actor.ActorHandle:
        return ray.get_actor(COORDINATOR, self.config.namespace)

    def new_front_end(self) -> RayInference:
        return RayInference(self.config.namespace, self.control)

    def free_bytes(self, index: int) -> int:
        """As this process, which has nothing of the ranks', sees the device."""
        return Device.host(self.device_name(index), CAPACITY_BYTES).memory_info()[0]

    async def loaded(self) -> Torpor:
        await self.cluster.wait_until_loaded(300)  # seconds: others may use the machine
        return self

    async def operate(self, kind: Kind, timeout_s: float = 90.0) -> Operation:
        """To its end."""
        operation = await self.control.submit(OperationRequest(kind, self.config.models[0].name))
        operation = await self.control.wait(operation.id, timeout_s)
        assert operation.state is not OperationState.RUNNING, operation
        return operation

    async def sleep(self) -> Operation:
        return await self.operate(Kind.SLEEP)

    async def wake(self) -> Operation:
        return await self.operate(Kind.WAKE)

    async def view(self) -> ModelView:
        return await self.control.model(self.config.models[0].name)

    async def until(self, true_of: Callable[[ModelView], bool], timeout_s: float = 60.0) -> ModelView:
        """Poll the model. Fails with what it was last."""
        return await until(self.view, true_of, timeout_s)


@contextmanager
def starting(end_s: float = 30) -> Iterator[Callable[[ClusterConfig], Torpor]]:
    """Starts Torpors in the Ray that runs, each in its configuration's namespace; all are ended, in end_s each."""
    made: list[str] = []

    def start(config: ClusterConfig) -> Torpor:
        name = config.namespace
        create_coordinator(config)
        made.append(name)
        control = RayControl(name)
        return Torpor(Cluster(control, RayInference(name, control), name, owned=False), config)

    yield start
    for name in made:
        coordinator = ray.get_actor(COORDINATOR, name)
        ray.get(coordinator.shutdown.remote(), timeout=end_s)
        ray.kill(coordinator)


async def until(ask: Callable[[], Awaitable[T]], true_of: Callable[[T], bool], timeout_s: float) -> T:
    deadline = time.monotonic() + timeout_s
    while not true_of(answer := await ask()):
        assert time.monotonic() < deadline, f"still {answer}"
        await asyncio.sleep(0.1)
    return answer


def request(tokens: int = 4, prompt: str = "hello") -> GenerateRequest:
    return GenerateRequest(uuid.uuid4().hex, prompt, sampling=Sampling(max_tokens=tokens))


async def read(inference: Inference, wanted: GenerateRequest, model: str = "toy") -> list[TokenEvent]:
    """All events, to the last; at most 30 s."""
    async with asyncio.timeout(30):
        return [event async for event in inference.generate(model, wanted)]


def is_in(*states: ModelState) -> Callable[[ModelView], bool]:
    return lambda view: view.state in states


MakeTorpor = Callable[..., Torpor]
