"""`torpor apply`: makes a running cluster as a file says, and starts its coordinator where there is none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from torpor.actors.config import ClusterConfig
from torpor.actors.ports import Control, ControlUnreachable
from torpor.service.apply.plan import Plan, make_plan, plan_json
from torpor.service.apply.reconcile import Outcome, Reconciler, Result, result_json
from torpor.service.cli import tables
from torpor.service.cli.boards import board_on
from torpor.service.cli.output import Output
from torpor.service.cli.serve_command import say, with_default_model
from torpor.service.progress import Board
from torpor.service.serve import ServeError
from torpor.service.settings.load import load_settings
from torpor.service.settings.shape import Settings, cluster_config

DONE, FAILED, REJECTED = 0, 1, 3
_DESCRIBE_S = 60  # a coordinator that restarts meanwhile is waited for


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says. timeout_s: how long models may take to load; 0 = nobody waits for them."""

    file: Path
    address: str | None = None
    dry_run: bool = False
    prune: bool = False
    as_json: bool = False
    timeout_s: float = 600.0


class Joined(Protocol):
    """A Ray cluster that was joined, and what may be done there."""

    @property
    def control(self) -> Control: ...
    def has_coordinator(self) -> bool: ...
    def start_coordinator(self, config: ClusterConfig) -> None:
        """With all models of the configuration. Nothing happens where somebody else was faster."""

    def drop_coordinator(self) -> None:
        """One that was started and cannot work."""

    def shutdown(self) -> None: ...


Join = Callable[[str, str], Joined]  # namespace, address


def run_apply(wishes: Wishes, join: Join | None = None, console: Console | None = None) -> int:
    """The exit code: 0 as the file says, 1 something failed, 3 something was refused. Raises ServeError.

    console: where progress is told, by default stderr.
    """
    environment = dict(os.environ)
    if wishes.address is not None:
        environment["TORPOR_RAY__ADDRESS"] = wishes.address
    settings = with_default_model(load_settings(wishes.file, environment), environment)
    config = cluster_config(settings)
    joined = (join or join_ray_cluster)(config.namespace, settings.ray.address)
    try:
        return asyncio.run(_apply(joined, settings, config, wishes, console or Console(stderr=True)))
    except ControlUnreachable as error:
        raise ServeError(str(error)) from None
    finally:
        joined.shutdown()


async def _apply(
    joined: Joined, settings: Settings, config: ClusterConfig, wishes: Wishes, console: Console
) -> int:
    there = joined.has_coordinator()
    plan = make_plan(await _described(joined.control) if there else None, config, settings, wishes.prune)
    report: dict[str, Any] = {"coordinator": "running" if there else "to be started", **plan_json(plan)}
    if not wishes.as_json:
        Console().print(tables.plan(report))
    results: list[Result] = []
    lost = models_lost_by(plan)
    if not plan.fixed and not lost and not wishes.dry_run:
        with board_on(console, bars=not wishes.as_json) as board:
            results = await _carry_out(joined, config, board, plan, there, wishes)
        report["results"] = [result_json(result) for result in results]
    if wishes.as_json:
        Output(True).show(report, tables.plan)
    for each in plan.fixed:
        say(
            f"{each.key} is {each.old} in the running cluster and {each.new} here, and is fixed while it runs; "
            "nothing was changed. Leave it out or set it alike, or end that cluster (`ray stop`) and apply again"
        )
    for name, path in lost.items():
        say(
            f"{name}: its engine.model would be {path}, which is not on this machine, where the present one is; "
            "nothing was changed, since the model that runs would be deleted first. Correct the path"
        )
    for result in results:
        if result.outcome is not Outcome.DONE:
            say(f"{result.step.model.name}: {result.outcome}: {result.reason}")
    return REJECTED if plan.fixed or lost else _code(results)


async def _carry_out(
    joined: Joined, config: ClusterConfig, board: Board, plan: Plan, there: bool, wishes: Wishes
) -> list[Result]:
    reconciler = Reconciler(joined.control, board)
    try:
        if not there:
            board.say(f"starting the coordinator in the namespace {config.namespace!r}")
            joined.start_coordinator(config)  # whose models are there when they are asked for below
        results = await reconciler.carry_out(plan)
    except ControlUnreachable:
        if not there:
            joined.drop_coordinator()
        raise
    return await reconciler.wait_until_loaded(results, wishes.timeout_s) if wishes.timeout_s else results


async def _described(control: Control) -> ClusterConfig:
    try:
        async with asyncio.timeout(_DESCRIBE_S):
            return await control.describe()
    except TimeoutError:
        raise ServeError(f"the coordinator did not answer within {_DESCRIBE_S} s; look at its logs") from None


def _code(results: Sequence[Result]) -> int:
    outcomes = {result.outcome for result in results}
    if Outcome.FAILED in outcomes:
        return FAILED
    return REJECTED if Outcome.REJECTED in outcomes else DONE


def models_lost_by(plan: Plan) -> dict[str, str]:
    """Running models that would be deleted for one that cannot load, by name the wrong path.

    Where the present path is not on this machine either, the ranks have disks of their own, and know better.
    """
    return {
        step.model.name: str(each.new)
        for step in plan.steps
        for each in step.differences
        if each.key == "engine.model" and Path(str(each.old)).exists() and not Path(str(each.new)).exists()
    }


def join_ray_cluster(namespace: str, address: str) -> Joined:
    # Here, so that the other commands start without waiting for Ray's import.
    from torpor.actors.cluster import NoCluster, connect

    try:
        joined: Joined = connect(namespace, address)
    except NoCluster as error:
        raise ServeError(str(error)) from None
    return joined
