"""OpenAI's surface: models, completions, chat completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from torpor.service.auth.guard import caller_of
from torpor.service.bodies import read_json, unknown_model
from torpor.service.context import Context, context_of
from torpor.service.dialects.mounts import mounted_model
from torpor.service.docs import json_body
from torpor.service.openai.bodies import ChatBody, CompletionBody, parse_generation
from torpor.service.openai.generation import Generation
from torpor.service.openai.shapes import AnswerHead, answer_chunks, whole_answer
from torpor.service.operations import find_model, published_models
from torpor.service.sse import EventStream, while_connected
from torpor.service.tracing import traceparent_of
from torpor.service.wire import ignored_header

router = APIRouter(prefix="/v1", tags=["openai"])


@router.get("/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models, asleep ones included; under /m/ that one, or 404."""
    only = mounted_model(request)
    views = await published_models(context_of(request).control)
    known = [view.name for view in views]
    if only is not None and only not in known:
        raise unknown_model(only, known)
    shown = known if only is None else [only]
    return {"object": "list", "data": [_model(name, request) for name in shown]}


@router.get("/models/{name}")
async def get_model(name: str, request: Request) -> dict[str, Any]:
    """One model. 404 lists the known ones."""
    view = await find_model(context_of(request).control, name)
    return _model(view.name, request)


def _model(name: str, request: Request) -> dict[str, Any]:
    created = int(request.app.state.started_at)
    return {"id": name, "object": "model", "created": created, "owned_by": "torpor"}


@router.post("/chat/completions", openapi_extra=json_body(ChatBody))
async def chat(request: Request) -> Response:
    """A chat completion, whole or streamed. A model that sleeps answers 503 with Retry-After."""
    return await _generate(request, parse_generation(ChatBody, await _read(request)))


@router.post("/completions", openapi_extra=json_body(CompletionBody))
async def complete(request: Request) -> Response:
    """A completion of a text or of token ids, whole or streamed."""
    return await _generate(request, parse_generation(CompletionBody, await _read(request)))


async def _read(request: Request) -> dict[str, Any] | None:
    """The base URL may name the model: then the body need not, and may name no other."""
    tree, mounted = await read_json(request), mounted_model(request)
    if mounted is None:
        return tree
    named = (tree or {}).get("model", mounted)
    if isinstance(named, str) and named != mounted:
        raise unknown_model(named, [mounted])
    return {**(tree or {}), "model": named}


async def _generate(request: Request, body: ChatBody | CompletionBody) -> Response:
    context = context_of(request)
    chat = isinstance(body, ChatBody)
    answer_id = body.rid or ("chatcmpl-" if chat else "cmpl-") + context.new_id()
    # A part of each request's own, which stays unique whatever a client calls its: aborts go by it.
    asked = body.requests(lambda: f"{answer_id}/{context.new_id()}", caller_of(request))
    asked = [replace(one, traceparent=traceparent_of(request)) for one in asked]
    head = AnswerHead(
        id=answer_id,
        created_at=int(context.clock()),
        model=body.model,
        chat=chat,
        choices_per_prompt=body.choices_per_prompt,
        token_ids=body.return_token_ids,
        echoes=body.echoes(),
    )
    headers = ignored_header(body.ignored)
    generation = Generation(context.inference, context.admission, body.model, asked)
    if not body.stream:
        work = _whole(context, generation, head, len(asked))
        return JSONResponse(await while_connected(request, work), headers=headers)
    await while_connected(request, _start(context, generation, body.model))
    chunks = answer_chunks(head, generation.events(), len(asked), body.include_usage)
    return EventStream(chunks, generation.close, headers, context.keep_alive_s)


async def _start(context: Context, generation: Generation, model: str) -> None:
    try:
        await generation.start()
    except KeyError:
        known = [view.name for view in await published_models(context.control)]
        raise unknown_model(model, known) from None
    except BaseException:
        await generation.close()
        raise


async def _whole(context: Context, generation: Generation, head: AnswerHead, count: int) -> dict[str, Any]:
    await _start(context, generation, head.model)
    try:
        return await whole_answer(head, generation.events(), count)
    finally:
        await generation.close()
