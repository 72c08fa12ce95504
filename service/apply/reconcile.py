"""Carries a plan out over the Control port: deletions first, since what they free is what the others need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from torpor.actors.messages import (
    Kind,
    ModelState,
    ModelView,
    OnConflict,
    Operation,
    OperationRequest,
    OperationState,
)
from torpor.actors.ports import Control, ControlUnreachable, ModelExists
from torpor.service.apply.plan import Action, Plan, Step
from torpor.service.progress import Board, of_model, of_operation
from torpor.service.wire import model_json, operation_json

_POLL_S = 0.25
_RANKS_S = 1.0  # for ranks to tell whether they have loaded
_COMING = (ModelState.LOADING, ModelState.RECOVERING)


class Outcome(StrEnum):
    DONE = "done"
    REJECTED = "rejected"  # nothing was changed of this model
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Result:
    step: Step
    outcome: Outcome = Outcome.DONE
    reason: str = ""


class Reconciler:
    """board: is told of progress."""

    def __init__(self, control: Control, board: Board) -> None:
        self._control = control
        self._board = board

    async def carry_out(self, plan: Plan) -> list[Result]:
        """One result for each step, in the plan's order. A model that cannot be deleted keeps no other from its step."""
        deleted = await asyncio.gather(*map(self._delete, plan.steps))
        return [await self._put(each.step) if each.outcome is Outcome.DONE else each for each in deleted]

    async def wait_until_loaded(self, results: Sequence[Result], timeout_s: float) -> list[Result]:
        """The same, failed where a model that is wanted has not come up, or is failed from before."""
        told: dict[str, ModelState] = {}
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while True:
            views = {view.name: view for view in await self._control.models()}
            coming = [view for view in views.values() if view.state in _COMING]
            for view in coming:
                self._board.show(view.name, of_model(model_json(await self._with_ranks(view))))
            for name, view in views.items():
                if view.state not in _COMING and told.get(name) is not view.state:
                    self._board.end(name)
                    self._board.say(f"{name}: {view.state}")
                told[name] = view.state
            if not coming or loop.time() > end_s:
                return [_loaded(result, views, timeout_s) for result in results]
            await asyncio.sleep(_POLL_S)

    async def _with_ranks(self, view: ModelView) -> ModelView:
        """As published where ranks do not tell in time, or nobody would see it."""
        if self._board.live:
            with contextlib.suppress(TimeoutError, KeyError):
                async with asyncio.timeout(_RANKS_S):
                    return await self._control.model(view.name)
        return view

    async def _delete(self, step: Step) -> Result:
        if not step.deletes:
            return Result(step)
        name = step.model.name
        self._board.say(f"{name}: deleting")
        wish = OperationRequest(Kind.DELETE, name, on_conflict=OnConflict.WAIT)
        begun = await self._control.submit(wish)
        watching = asyncio.create_task(self._watch(begun.id))
        try:
            operation: Operation = await self._control.wait(begun.id)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._board.end(begun.id)
        if operation.state is OperationState.SUCCEEDED:
            return Result(step)
        rejected = operation.state is OperationState.REJECTED
        reason = f"it was not deleted ({operation.id}): {operation.reason or operation.state}"
        return Result(step, Outcome.REJECTED if rejected else Outcome.FAILED, reason)

    async def _watch(self, operation_id: str) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            with contextlib.suppress(ControlUnreachable):
                operation = await self._control.operation(operation_id)
                if operation.state is OperationState.RUNNING:
                    self._board.show(operation_id, of_operation(operation_json(operation)))

    async def _put(self, step: Step) -> Result:
        try:
            if step.creates:
                self._board.say(f"{step.model.name}: creating, {step.model.tensor_parallel} rank(s)")
                await self._control.create(step.model)
            elif step.action is Action.CHANGE:
                await self._control.adapt(step.model)
        except (ModelExists, KeyError) as error:
            reason = f"somebody else changes this cluster too ({error}); apply again"
            return Result(step, Outcome.REJECTED, reason)
        return Result(step)


def _what_to_do(step: Step) -> str:
    """With a model that has failed, as this file has it."""
    again = f"`torpor recover {step.model.name}` makes its ranks anew"
    if step.action is Action.KEEP:
        return f"; its entry has not changed: {again} once the cause is mended, or change the entry and apply again"
    return f"; change its entry and apply again, or, if the cause lies elsewhere, {again}"


def _loaded(result: Result, views: dict[str, ModelView], waited_s: float) -> Result:
    view = views.get(result.step.model.name)
    wanted = result.step.action not in (Action.PRUNE, Action.LEAVE)
    if result.outcome is not Outcome.DONE or not wanted:
        return result
    if view is None:
        return replace(result, outcome=Outcome.FAILED, reason="somebody has deleted it; apply again")
    if view.state is ModelState.FAILED:
        reason = view.error or "no reason given"
        reason += _what_to_do(result.step)
        return replace(result, outcome=Outcome.FAILED, reason=reason)
    if view.state in _COMING:
        reason = f"still {view.state} after {waited_s:g} s; it goes on, look at `torpor status`"
        return replace(result, outcome=Outcome.FAILED, reason=reason)
    return result


def result_json(result: Result) -> dict[str, str]:
    step = result.step
    return {
        "model": step.model.name,
        "action": step.action,
        "outcome": result.outcome,
        "reason": result.reason,
    }
