"""SGLang's calls. Safe to repeat; they answer when the memory is free, or back, on every rank."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from torpor.actors.messages import DrainMode, RejectCode
from torpor.actors.ports import GateClosed
from torpor.service.context import context_of
from torpor.service.dialects.bodies import (
    AbortBody,
    NoFields,
    PauseGenerationBody,
    TagsBody,
    UpdateFromDiskBody,
    query_parameters,
)
from torpor.service.dialects.carrying import (
    MODE,
    TAGS,
    Asked,
    abort,
    answer,
    hear,
    pause,
    reset,
    sleep,
    to_its_end,
    unpause,
    update,
    wake,
)
from torpor.service.dialects.dialect import Dialect
from torpor.service.docs import json_body
from torpor.service.gate.pulse import Mute, make_token
from torpor.service.problems import Code, Problem
from torpor.service.sse import while_connected

router = APIRouter(tags=["drop-in"])
_UPDATE = frozenset({"model_path", "abort_all_requests"})


@router.post("/release_memory_occupation", openapi_extra=json_body(TagsBody))
async def release_memory_occupation(request: Request) -> Response:
    """Sleep, by tags."""
    asked = await hear(request, Dialect.SGLANG, TAGS)
    return answer(asked, await to_its_end(sleep(asked)))


@router.post("/resume_memory_occupation", openapi_extra=json_body(TagsBody))
async def resume_memory_occupation(request: Request) -> Response:
    """Wake, by tags."""
    asked = await hear(request, Dialect.SGLANG, TAGS)
    return answer(asked, await to_its_end(wake(asked)))


@router.post("/update_weights_from_disk", openapi_extra=json_body(UpdateFromDiskBody))
async def update_weights_from_disk(request: Request) -> Response:
    """Write other weights in place, from a path under weights_roots. `success` is in every answer."""
    asked = await hear(request, Dialect.SGLANG, _UPDATE)
    path, abort = asked.tree.get("model_path"), asked.tree.get("abort_all_requests")
    if not isinstance(path, str) or not path:
        raise _not_updated(422, Code.INVALID_FIELD, "`model_path` is to be a path.", "Send `model_path`.")
    try:
        done = await to_its_end(update(asked, path, DrainMode.ABORT if abort is True else DrainMode.FINISH))
    except Problem as problem:
        problem.fields |= {"success": False, "message": problem.detail}
        raise
    told = {"success": True, "message": f"operation {done.id} succeeded", "num_paused_requests": 0}
    return answer(asked, done, told)


@router.post("/pause_generation", openapi_extra=json_body(PauseGenerationBody))
async def pause_generation(request: Request) -> Response:
    """Let nobody in. What runs is ended (abort, the default), or goes on afterwards (retract, in_place)."""
    asked = await hear(request, Dialect.SGLANG, MODE)
    return answer(asked, await to_its_end(pause(asked)), _ok("paused"))


@router.post("/continue_generation", openapi_extra=json_body(NoFields))
async def continue_generation(request: Request) -> Response:
    """End a pause. What sleeps stays asleep."""
    asked = await hear(request, Dialect.SGLANG)
    return answer(asked, await to_its_end(unpause(asked)), _ok("continued"))


@router.post("/abort_request", openapi_extra=json_body(AbortBody))
async def abort_request(request: Request) -> Response:
    """End requests with what they have so far: the one of this `rid`, which is its answer's id, or all.

    Those that wait for a closed gate end, too, at every front end.
    """
    asked = await hear(request, Dialect.SGLANG, frozenset({"rid", "abort_all"}))
    rid, everything = asked.tree.get("rid"), asked.tree.get("abort_all") is True
    if not everything and not (isinstance(rid, str) and rid):
        hint = 'Send {"rid": "chatcmpl-…"}, or {"abort_all": true}.'
        raise Problem(422, Code.INVALID_FIELD, "Neither `rid` nor `abort_all` says what to abort.", hint=hint)
    count = await to_its_end(abort(asked, None if everything else str(rid)))
    return answer(asked, None, {"aborted_requests": count})


@router.get("/flush_cache", openapi_extra=query_parameters("model", "id"))
async def look_and_flush_cache(request: Request) -> Response:
    """As the POST: SGLang's clients send either."""
    return await flush_cache(request)


@router.post("/flush_cache", openapi_extra=query_parameters("model", "id"))
async def flush_cache(request: Request) -> Response:
    """Forget all prefixes, on every tier: 200 when that is done, 400 while requests run. They are not harmed."""
    asked = await hear(request, Dialect.SGLANG)
    # In a pause nothing runs: what stands still is computed anew afterwards.
    drain = DrainMode.FREEZE if asked.view.paused else DrainMode.IF_IDLE
    try:
        done = await to_its_end(reset(asked, drain))
    except Problem as problem:
        problem.status = 400 if problem.code == RejectCode.NOT_IDLE else problem.status
        raise
    return answer(asked, done, {"success": True, "message": "prefixes are forgotten on every tier"})


@router.get("/health_generate", openapi_extra=query_parameters("model", "id"))
async def health_generate(request: Request) -> Response:
    """200 once the model has made a token, for this probe or for somebody else; 503 where it sleeps, or makes none.

    It wakes nothing, waits for no gate, and keeps no model from being idle.
    """
    asked = await hear(request, Dialect.SGLANG)
    context = context_of(request)
    try:
        async with asyncio.timeout(context.probe_timeout_s):
            view = await context.control.model(asked.view.name)
    except (TimeoutError, KeyError):
        raise _unhealthy(asked, "no answer in time") from None
    broken = next((f"rank {rank.rank}: {rank.error}" for rank in view.ranks if rank.error), "")
    if broken or not view.gate_open:
        raise _unhealthy(asked, broken or str(view.gate_reason))
    probing = make_token(context.inference, view.name, f"probe-{context.new_id()}", context.token_timeout_s)
    try:
        await while_connected(request, probing)
    except GateClosed as closed:
        raise _unhealthy(asked, str(closed.reason)) from None
    except Mute as mute:
        raise _unhealthy(asked, str(mute), Code.GENERATION_FAILED) from None
    return Response(status_code=200)


def _ok(what: str) -> dict[str, Any]:
    return {"status": "ok", "message": f"generation is {what}"}


def _unhealthy(asked: Asked, why: str, code: Code = Code.GATE_CLOSED) -> Problem:
    detail = f"{asked.view.name!r} serves nobody now: {why}."
    return Problem(503, code, detail, hint="Look at GET /models; wake it if it is asleep.")


def _not_updated(status: int, code: Code, detail: str, hint: str) -> Problem:
    fields: dict[str, Any] = {"success": False, "message": detail}
    return Problem(status, code, detail, hint=hint, **fields)
