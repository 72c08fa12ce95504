"""`Client.from_ray`: the client for programs that are in the Ray cluster themselves, such as trainers."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx

from torpor.actors.cluster import Cluster, NoCluster, join
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
from torpor.actors.tracing import current_traceparent
from torpor.service.app import create_app
from torpor.service.client.app_transport import AppTransport
from torpor.service.client.blocking import Client
from torpor.service.client.calls import DEFAULT_TIMEOUT_S, program_name
from torpor.service.client.errors import ClientError, ConnectionFailed, problem_error
from torpor.service.gate.gates import Gates
from torpor.service.logs import make_logger
from torpor.service.problems import operation_problem
from torpor.service.wire import operation_json

DESCRIBE_S = 30.0  # a coordinator that restarts meanwhile is waited for


class RayClient(Client):
    """All calls of `Client`, by way of a front end in this process, and tensors for a model's weights.

    The process is connected to the Ray cluster when this is made, unless it is already, and stays so. Whoever is in
    the cluster may do everything: no access token is asked for. Close it when it is used no more.
    """

    def __init__(self, namespace: str, address: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._namespace = namespace
        try:
            cluster = join(namespace, address)
        except NoCluster as error:
            raise ConnectionFailed(str(error)) from None
        self._control: Control = cluster.control
        self._transport = AppTransport(peer="ray")
        try:
            self._front = self._transport.run(_front_end(cluster))
        except (ControlUnreachable, TimeoutError) as error:
            self._transport.close()
            raise ConnectionFailed(
                str(error) or f"the coordinator did not answer within {DESCRIBE_S} s; look at its logs"
            ) from None
        self._transport.serve(self._front)
        super().__init__(f"http://{namespace}.ray", timeout_s=timeout_s, token="", transport=self._transport)

    def update_weights(
        self,
        model: str,
        path: str | Mapping[str, Any],
        *,
        drain: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        dry_run: bool | None = None,
        on_conflict: str | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
        generation: int | None = None,
    ) -> dict[str, Any]:
        """Write these weights into the model where it lies; the finished operation's record, with their version.

        path: as of `Client.update_weights`, or all of the model's tensors, whole, by the checkpoint's names: torch
        tensors on any device, or references to such in the object store. Each rank fetches them and keeps its share;
        they are held until the end, so that `wait` must be left as it is.
        """
        if isinstance(path, str):
            return super().update_weights(
                model,
                path,
                drain=drain,
                timeout_s=timeout_s,
                dry_run=dry_run,
                on_conflict=on_conflict,
                wait=wait,
                idempotency_key=idempotency_key,
                generation=generation,
            )
        if not wait or idempotency_key is not None or generation is not None:
            raise ClientError(
                "tensors are held by this process until the update's end: "
                "leave out `wait`, `idempotency_key` and `generation`"
            )
        wish = OperationRequest(
            Kind.UPDATE,
            model,
            ("weights",),
            drain=_drain(drain or {}),
            dry_run=bool(dry_run),
            on_conflict=OnConflict.WAIT if on_conflict == "wait" else OnConflict.REJECT,
            timeout_s=timeout_s,
            caller=program_name(),
        )
        return self._hand_over(wish, path)

    def _hand_over(self, wish: OperationRequest, tensors: Mapping[str, Any]) -> dict[str, Any]:
        try:
            with hand_over(self._namespace, tensors) as name:
                handed = replace(wish, weights_handed=name, traceparent=current_traceparent())
                operation = self._transport.run(self._do(handed))
        except WeightsRefused as error:
            raise ClientError(str(error)) from error
        except ControlUnreachable as error:
            raise ConnectionFailed(str(error)) from error
        if (problem := operation_problem(operation)) is not None:
            told = f"/models/{wish.model}/update_weights"
            raise problem_error(httpx.Response(problem.status, json=problem.body(told)))
        return operation_json(operation)

    async def _do(self, wish: OperationRequest) -> Operation:
        operation = await self._control.submit(wish)
        if operation.state is OperationState.RUNNING:
            return await self._control.wait(operation.id)
        return operation

    def close(self) -> None:
        """Ends the front end of this client; the connection to Ray is the process's, and stays."""
        if not self._transport.closed:
            self._transport.run(_end(self._front))
        super().close()


def _drain(wishes: Mapping[str, Any]) -> DrainSpec:
    try:
        mode = DrainMode(wishes.get("mode", "finish"))
    except ValueError:
        raise ClientError(f"drain.mode {wishes['mode']!r}; known: {', '.join(DrainMode)}") from None
    return DrainSpec(mode, wishes.get("timeout_s"), wishes.get("freeze_timeout_s"))


async def _front_end(cluster: Cluster) -> Any:
    async with asyncio.timeout(DESCRIBE_S):
        config = await cluster.control.describe()
    gates = Gates(config, cluster.control)
    return create_app(
        cluster.control, cluster.inference, logger=make_logger(sys.stderr, logging.ERROR), gates=gates
    )


async def _end(front: Any) -> None:
    front.state.context.ending.set()
    await front.state.context.inference.close()
