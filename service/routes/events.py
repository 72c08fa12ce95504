"""GET /events: what happens to models and operations, as it happens, and again from where a client left off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from torpor.actors.news import Change, Position
from torpor.actors.ports import ControlUnreachable
from torpor.service.context import Context, context_of
from torpor.service.problems import Code, Problem
from torpor.service.sse import EventStream
from torpor.service.wire import model_json, operation_json

router = APIRouter(tags=["native"])
WAIT_S = 60.0  # of one question for news
AGAIN_S = 1.0  # after the coordinator was not there
T = TypeVar("T")
# Without an id: Last-Event-ID stays the one of the last change.
_ENDING = b'event: ending\ndata: {"hint":"This front end ends; go on at another with Last-Event-ID."}\n\n'


@router.get("/events", response_class=Response)
async def events(request: Request, model: str | None = None) -> Response:
    """Server-sent events: `model`, `operation`, `deleted`, `reset` where some were missed, `ending` at last.

    With Last-Event-ID, what has come since then first.
    """
    last = request.headers.get("last-event-id", "").strip()
    try:
        after = Position.parse(last) if last else None
    except ValueError as error:
        raise Problem(400, Code.INVALID_FIELD, f"Last-Event-ID: {error}.", hint="Leave it out.") from None
    context = context_of(request)
    return EventStream(_chunks(context, after, model), _nothing, {}, context.keep_alive_s)


async def _chunks(context: Context, after: Position | None, model: str | None) -> AsyncIterator[bytes]:
    while True:
        try:
            news = await _unless_ending(context, context.control.changes(after, WAIT_S))
        except ControlUnreachable:
            if await _unless_ending(context, asyncio.sleep(AGAIN_S, result=True)):
                continue
            news = None
        if news is None:
            yield _ENDING
            return
        chunks = [_chunk(change) for change in news.changes if _concerns(change, model)]
        if after is None or (news.until != after and not chunks):
            chunks.append(f"id: {news.until}\n\n".encode())  # moves a client on, and is no event to it
        after = news.until
        for chunk in chunks:
            yield chunk


async def _unless_ending(context: Context, work: Coroutine[Any, Any, T]) -> T | None:
    """Its result; None when the service ends first."""
    task, ending = asyncio.ensure_future(work), asyncio.ensure_future(context.ending.wait())
    try:
        await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
        return None if ending.done() else await task
    finally:
        task.cancel()
        ending.cancel()


def _concerns(change: Change, model: str | None) -> bool:
    if model is None or change.reset:
        return True
    names = (
        change.deleted,
        change.model.name if change.model is not None else "",
        change.operation.model if change.operation is not None else "",
    )
    return model in names


def _chunk(change: Change) -> bytes:
    kind, data = _event(change)
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"id: {change.at}\nevent: {kind}\ndata: {text}\n\n".encode()


def _event(change: Change) -> tuple[str, dict[str, Any]]:
    if change.reset:
        return "reset", {"hint": "Events were missed; read /models and /operations anew."}
    if change.model is not None:
        return "model", model_json(change.model)
    if change.operation is not None:
        return "operation", operation_json(change.operation)
    return "deleted", {"model": change.deleted}


async def _nothing() -> None:
    return None
