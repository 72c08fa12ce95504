"""Two models that share one device, too small for both awake: switches under load, with every answer looked at (F23).

Their answers are compared with those that each gave before it had ever slept.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from ranks.torpors import until
from torpor.actors.cluster import Cluster
from torpor.actors.config import ClusterConfig, GateConfig, ModelConfig
from torpor.actors.messages import (
    FinishReason,
    GenerateRequest,
    Kind,
    MakeRoom,
    ModelState,
    Operation,
    OperationRequest,
    OperationState,
    Origin,
    RestoreMode,
    Sampling,
)
from torpor.actors.ports import Inference
from torpor.service.gate.gates import Gates
from torpor.service.gate.patience import PatientInference

TOKENS = 8
PATIENCE_S = 600.0  # of one request
PROMPTS = tuple(tuple(range(3 + number, 20 + 3 * number)) for number in range(12))
WAKE = GateConfig(when_closed="wake", make_room="idle", queue_limit=1000, queue_timeout_s=PATIENCE_S)
QUEUE = GateConfig(when_closed="queue", queue_limit=1000, queue_timeout_s=PATIENCE_S)


class Uncounted:
    def count_waiting(self, model: str, change: int) -> None: ...

    def observe_wait(self, model: str, seconds: float) -> None: ...


async def tokens_of(inference: Inference, model: str, prompt: tuple[int, ...], name: str) -> list[int]:
    """A whole greedy answer. Fails where it does not end by its length."""
    wanted = GenerateRequest(name, token_ids=prompt, sampling=Sampling(max_tokens=TOKENS, temperature=0.0))
    async with asyncio.timeout(PATIENCE_S):
        events = [event async for event in inference.generate(model, wanted)]
    assert events[-1].finish_reason is FinishReason.LENGTH, events[-1]
    return [token for event in events for token in event.token_ids]


@dataclass
class Switches:
    """`first` is loaded by the cluster, `second` made once the first sleeps: there is no room for both.

    Both are configured with the gate WAKE.
    """

    cluster: Cluster
    config: ClusterConfig
    second: ModelConfig
    expected: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def names(self) -> tuple[str, str]:
        return self.config.models[0].name, self.second.name

    async def begin(self) -> None:
        """Both are there, and what they say is known. The second is awake, the first asleep by idleness."""
        control, first = self.cluster.control, self.names[0]
        await self.cluster.wait_until_loaded(300)
        await self._learn(first)
        await self._succeed(OperationRequest(Kind.SLEEP, first, origin=Origin.IDLENESS))
        await control.create(self.second)
        async with asyncio.timeout(300):
            while (view := await control.model(self.names[1])).state is not ModelState.AWAKE:
                assert view.state is ModelState.LOADING, view
                await asyncio.sleep(0.2)
        await self._learn(self.names[1])
        no_room = await self._operate(OperationRequest(Kind.WAKE, first))
        assert no_room.code == "device_memory", f"there is room for both: nothing would be tested: {no_room}"

    async def on_request(self, clients: int, switches: int) -> float:
        """Policy wake: requests wake the model that they want, idle neighbours give way. Seconds it took."""
        began_s, before = time.monotonic(), await self._woken()
        async with self._load(clients, WAKE, "wake"):
            await until(self._woken, lambda woken: woken - before >= switches, PATIENCE_S)
        return time.monotonic() - began_s

    async def by_hand(self, clients: int, switches: int) -> float:
        """Policy queue: a person puts the one to sleep and wakes the other. Seconds it took."""
        began_s = time.monotonic()
        async with self._load(clients, QUEUE, "queue"):
            for number in range(switches):
                kept = RestoreMode.PINNED if number % 2 else RestoreMode.NONE
                await self.switch(kept)
        return time.monotonic() - began_s

    async def switch(self, kept: RestoreMode = RestoreMode.NONE) -> None:
        """Each request waits for its model; kept: what becomes of the KV cache of the one that goes to sleep."""
        awake, asleep = self.names
        if (await self.cluster.control.model(awake)).state is not ModelState.AWAKE:
            awake, asleep = asleep, awake
        await self._succeed(OperationRequest(Kind.SLEEP, awake, restore={"kv_cache": kept}))
        await self._succeed(OperationRequest(Kind.WAKE, asleep, make_room=MakeRoom.NONE))

    def _load(self, clients: int, gate: GateConfig, policy: str) -> _Load:
        models = tuple(replace(model, gate=gate) for model in (*self.config.models, self.second))
        gates = Gates(replace(self.config, models=models))
        return _Load(self, clients, gates, policy)

    async def ask(self, inference: Inference, model: str, number: int, name: str) -> None:
        said = await tokens_of(inference, model, PROMPTS[number], name)
        assert said == self.expected[model, number], f"{model} has forgotten its answer to prompt {number}"

    async def _learn(self, model: str) -> None:
        for number, prompt in enumerate(PROMPTS):
            name = f"never-slept-{model}-{number}"
            self.expected[model, number] = await tokens_of(self.cluster.inference, model, prompt, name)

    async def _woken(self) -> int:
        operations = await self.cluster.control.operations(None, 100_000)
        failed = [one for one in operations if one.state is OperationState.FAILED]
        assert not failed, failed
        return sum(one.kind is Kind.WAKE and one.state is OperationState.SUCCEEDED for one in operations)

    async def _operate(self, request: OperationRequest) -> Operation:
        operation = await self.cluster.control.submit(request)
        return await self.cluster.control.wait(operation.id, 120)

    async def _succeed(self, request: OperationRequest) -> None:
        operation = await self._operate(request)
        assert operation.state is OperationState.SUCCEEDED, operation


class _Load:
    """Clients, each asking one model after the other, until the block ends; no request of theirs may be lost."""

    def __init__(self, switches: Switches, clients: int, gates: Gates, policy: str) -> None:
        self._switches = switches
        self._policy = policy
        control = switches.cluster.control
        self._inference = PatientInference(switches.cluster.inference, control, gates, Uncounted())
        self._stop = asyncio.Event()
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []
        self._asked = 0

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]

    async def __aexit__(self, kind: object, *error: object) -> None:
        self._stop.set()
        if kind is not None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            return
        while self._policy == "queue" and not all(task.done() for task in self._tasks):
            await self._switches.switch()  # the last requests wait for the one that sleeps
        await asyncio.gather(*self._tasks)
        assert self._switches.answers[self._policy] == self._asked, "a request has no answer"

    async def _client(self, client: int) -> None:
        turn = client
        while not self._stop.is_set():
            turn += 1
            self._asked += 1
            name = f"{self._policy}-{client}-{turn}"
            model = self._switches.names[turn % 2]
            await self._switches.ask(self._inference, model, turn % len(PROMPTS), name)
            self._switches.answers[self._policy] += 1
