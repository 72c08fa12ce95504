"""`Client.from_ray`: the client for programs that are in the Ray cluster themselves, such as trainers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from torpor.actors.cluster import NoCluster, join
from torpor.actors.engine.protocol import WeightsRefused
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    Kind,
    OnConflict,
    Operation,
    OperationRequest,
    OperationState,
)
from torpor.actors.ports import Control, ControlUnreachable
from torpor.actors.ray.handover import hand_over
from torpor.service.client.calls import program_name
from torpor.service.client.errors import ClientError, ConnectionFailed, problem_error
from torpor.service.problems import operation_problem
from torpor.service.wire import operation_json


class RayClient:
    """Blocking, and for what cannot go over HTTP. Raises as `Client` does.

    The process is connected to the Ray cluster when this is made, unless it is already, and stays
    so. Whoever is in the cluster may do
    everything: no access token is asked for.
    """

    def __init__(self, namespace: str, address: str) -> None:
        self._namespace = namespace
        try:
            self._control: Control = join(namespace, address).control
        except NoCluster as error:
            raise ConnectionFailed(str(error)) from None

    def update_weights(
        self,
        model: str,
        tensors: Mapping[str, Any],
        *,
        drain: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        on_conflict: str = "reject",
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Write these weights into the model where it lies; the finished operation's record, with their version.

        tensors: all of the model's, whole, by the checkpoint's names: torch tensors on any device, or references to
        such in the object store. Each rank fetches them and keeps its share. drain: {"mode", "timeout_s"}.
        """
        wishes = dict(drain or {})
        spec = DrainSpec(
            DrainMode(wishes.get("mode", "finish")), wishes.get("timeout_s"), wishes.get("freeze_timeout_s")
        )
        try:
            with hand_over(self._namespace, tensors) as name:
                wish = OperationRequest(
                    Kind.UPDATE,
                    model,
                    ("weights",),
                    drain=spec,
                    dry_run=dry_run,
                    on_conflict=OnConflict(on_conflict),
                    timeout_s=timeout_s,
                    caller=program_name(),
                    weights_handed=name,
                )
                operation = asyncio.run(self._do(wish))
        except WeightsRefused as error:
            raise ClientError(str(error)) from error
        except ControlUnreachable as error:
            raise ConnectionFailed(str(error)) from error
        if (problem := operation_problem(operation)) is not None:
            path = f"/models/{model}/update_weights"
            raise problem_error(httpx.Response(problem.status, json=problem.body(path)))
        return operation_json(operation)

    async def _do(self, wish: OperationRequest) -> Operation:
        operation = await self._control.submit(wish)
        if operation.state is OperationState.RUNNING:
            return await self._control.wait(operation.id)
        return operation

    def close(self) -> None:
        """Nothing to let go of: the connection to Ray is the process's."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
