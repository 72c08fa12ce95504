"""Carries out what a dialect's request asks for: finds its model, runs operations, makes the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torpor.actors.messages import DrainMode, DrainSpec, Kind, ModelView, Operation, OperationRequest
from torpor.actors.ports import Control
from torpor.service.bodies import model_required, read_json, unknown_model
from torpor.service.context import context_of
from torpor.service.dialects.dialect import MANNERS, Answer, Dialect, Tree, dialect_of
from torpor.service.dialects.mounts import mounted_model
from torpor.service.dialects.tags import read_tags
from torpor.service.dialects.wishes import DEFAULT_LEVEL, LEVELS, Wish, read_wish
from torpor.service.logs import note
from torpor.service.operations import finish, known_for, published_models, submit, who
from torpor.service.problems import Code, Problem, operation_problem
from torpor.service.wire import ignored_header, operation_json

T = TypeVar("T")
TAGS, MODE = frozenset({"tags"}), frozenset({"mode"})
LEVEL_MODE_TAGS = frozenset({"level", "mode", "tags"})


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its wish, its body, and the model that it is about."""

    request: Request
    control: Control
    wish: Wish
    tree: Tree
    view: ModelView

    def operation(self, kind: Kind, **fields: Any) -> OperationRequest:
        conflict = MANNERS[self.wish.dialect].on_conflict
        return OperationRequest(
            kind, self.view.name, on_conflict=conflict, caller=who(self.request), **fields
        )

    def drain(self) -> DrainSpec:
        return DrainSpec(self.wish.mode or MANNERS[self.wish.dialect].drain)


def query_of(request: Request) -> dict[str, list[str]]:
    return {name: request.query_params.getlist(name) for name in request.query_params}


async def hear(request: Request, otherwise: Dialect, uses: frozenset[str] = frozenset()) -> Asked:
    """Read a request. otherwise: its dialect where it shows none of another's marks."""
    tree = await read_json(request)
    fixed = otherwise in (Dialect.SGLANG, Dialect.TENSORRT_LLM)  # their paths are their own
    dialect = otherwise if fixed else dialect_of(query_of(request), tree, otherwise)
    return await understand(request, dialect, tree, uses)


async def understand(request: Request, dialect: Dialect, tree: Tree | None, uses: frozenset[str]) -> Asked:
    """A request whose body has been read. uses: as read_wish has it."""
    wish = read_wish(dialect, query_of(request), tree, uses)
    control = context_of(request).control
    views = await published_models(control)
    name = one_model(wish.named, mounted_model(request), [view.name for view in views])
    view = next(view for view in views if view.name == name)
    return Asked(request, control, wish, tree or {}, view)


def one_model(named: tuple[str, ...], mounted: str | None, known: list[str]) -> str:
    """The one that is meant. Raises a Problem that lists the known ones."""
    names = sorted({*named, *(() if mounted is None else (mounted,))})
    if len(names) > 1:
        detail = f"This names several models: {', '.join(names)}."
        raise Problem(422, Code.INVALID_FIELD, detail, hint="Name one model, once.")
    if not names and len(known) != 1:
        raise model_required(known)
    name = names[0] if names else known[0]
    if name not in known:
        raise unknown_model(name, known)
    return name


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Also when the caller goes away between two operations (C7)."""
    return await asyncio.shield(asyncio.ensure_future(work))


async def run(asked: Asked, wish: OperationRequest) -> Operation:
    """To its end. Raises the Problem that its end is."""
    begun = await submit(asked.control, wish, asked.request)
    note(asked.request, operation_id=begun.id, model=begun.model)
    done = await finish(asked.control, begun)
    if (problem := operation_problem(done, known_for(done, [asked.view]))) is not None:
        raise problem
    return done


async def sleep(asked: Asked) -> Operation | None:
    """None: nothing that is named is there to sleep. Level 0, and the tag of scheduling, are a pause."""
    wish = asked.wish
    level = DEFAULT_LEVEL if wish.level is None else wish.level
    tags = read_tags(wish.tags, asked.view.tags)
    paused = None
    if level == 0 or (wish.tags is not None and tags.scheduling):
        paused = await pause(asked)
    if level == 0 or tags.memory == ():
        return paused
    leveled = wish.dialect in (Dialect.VLLM, Dialect.RAY_SERVE)
    restore = {tag: mode for tag, mode in LEVELS[level].items() if _is_meant(tag, tags.memory, asked.view)}
    return await run(
        asked,
        asked.operation(
            Kind.SLEEP, tags=tags.memory, restore=restore if leveled else {}, drain=asked.drain()
        ),
    )


async def wake(asked: Asked) -> Operation | None:
    """None: nothing that is named is there to wake. Without tags, and by that of scheduling, it ends a pause, too."""
    tags = read_tags(asked.wish.tags, asked.view.tags)
    woken = None
    if tags.memory != ():
        woken = await run(asked, asked.operation(Kind.WAKE, tags=tags.memory))
    if tags.scheduling and MANNERS[asked.wish.dialect].wake_ends_pause:
        await unpause(asked)
    return woken


async def pause(asked: Asked) -> Operation:
    """Where no mode is named, all these engines end what runs, and what waits to run."""
    drain = DrainSpec(asked.wish.mode or DrainMode.ABORT)
    paused = await run(asked, asked.operation(Kind.PAUSE, tags=(), drain=drain))
    if drain.mode is DrainMode.ABORT:
        await abort(asked)
    return paused


async def abort(asked: Asked, request: str | None = None) -> int:
    """End this request, or all, wherever they run or wait; how many."""
    return await context_of(asked.request).inference.abort_requests(asked.view.name, request)


async def unpause(asked: Asked) -> Operation:
    return await run(asked, asked.operation(Kind.UNPAUSE, tags=()))


async def reset(asked: Asked, drain: DrainMode) -> Operation:
    """Forget prefixes on every tier."""
    return await run(asked, asked.operation(Kind.RESET, tags=(), drain=DrainSpec(drain)))


async def update(asked: Asked, path: str, drain: DrainMode) -> Operation:
    if drain is DrainMode.ABORT:
        await abort(asked)
    return await run(
        asked, asked.operation(Kind.UPDATE, tags=("weights",), drain=DrainSpec(drain), weights_path=path)
    )


def _is_meant(tag: str, tags: tuple[str, ...] | None, view: ModelView) -> bool:
    return tag in (view.tags or (tag,)) if tags is None else tag in tags


def answer(asked: Asked, operation: Operation | None, body: Mapping[str, Any] | None = None) -> Response:
    """As the dialect's clients expect it; body: what this call answers besides."""
    headers = ignored_header(asked.wish.ignored)
    if operation is not None:
        headers["Torpor-Operation"] = operation.id
    if body is not None:
        return JSONResponse(dict(body), headers=headers)
    if MANNERS[asked.wish.dialect].answer is Answer.EMPTY:
        return Response(status_code=200, headers=headers)
    if operation is None:
        state = {"model": asked.view.name, "state": asked.view.state, "parked_tags": asked.view.parked_tags}
        return JSONResponse(state, headers=headers)
    return JSONResponse(operation_json(operation), headers=headers)
