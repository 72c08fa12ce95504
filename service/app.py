"""The factory of the HTTP application. It holds no truth: state lives with the coordinator."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from structlog.typing import FilteringBoundLogger

from torpor.actors.ports import Control, ControlUnreachable, InferenceAtLeaders, KeyReused
from torpor.service.admission import Admission
from torpor.service.auth.auditor import Auditor
from torpor.service.auth.guard import Guard
from torpor.service.auth.tokens_file import TokensFile
from torpor.service.context import Context
from torpor.service.dialects.mounts import Mounts, mount_urls, split_mount
from torpor.service.gate.gates import Gates
from torpor.service.gate.patience import PatientInference
from torpor.service.heads import Heads
from torpor.service.limits.bounds import Bounds
from torpor.service.limits.places import Places
from torpor.service.limits.rates import Rates
from torpor.service.logs import RequestLog, note
from torpor.service.metrics import Metrics
from torpor.service.openapi.document import document
from torpor.service.problems import Code, Problem
from torpor.service.routes import (
    audit,
    docs,
    events,
    health,
    lives,
    memory,
    native,
    openai,
    pauses,
    sglang,
    trim,
    vllm,
    weights,
)
from torpor.service.sse import ClientGone

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def service_version() -> str:
    try:
        return version("torpor")
    except PackageNotFoundError:  # run from the sources
        return "0.1.0+source"


def create_app(
    control: Control,
    inference: InferenceAtLeaders,
    *,
    logger: FilteringBoundLogger,
    gates: Gates,
    tokens: TokensFile | None = None,
    bounds: Bounds | None = None,
    lifespan: Lifespan | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The whole surface over a coordinator and leader ranks. `lifespan` is entered before any request.

    tokens None: everybody may do everything; only for a service that nobody else can reach.
    Before the server ends, `app.state.context.inference.close()` tells who waits or streams still.
    """
    bounds = bounds or Bounds()
    metrics = Metrics(since=clock())
    if tokens is not None:
        metrics.watch_tokens_file(lambda: bool(tokens.fault))
    patient = PatientInference(inference, control, gates, metrics)
    context = Context(control, patient, Admission(metrics, gates), metrics, clock, bounds)

    @asynccontextmanager
    async def whole_life(app: FastAPI) -> AsyncIterator[None]:
        async with (lifespan or _nothing)(app):
            yield

    app = FastAPI(
        title="Torpor",
        version=service_version(),
        description="Sleep and wake for the memory of LLM inference.",
        lifespan=whole_life,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; ours is routes/docs.py
        redoc_url=None,
    )
    app.state.context = context
    app.state.started_at = clock()
    app.state.logger = logger
    # In the order in which a request's path is looked for: what is asked most comes first.
    for surface in (
        openai,
        native,
        lives,
        pauses,
        weights,
        trim,
        events,
        audit,
        memory,
        vllm,
        sglang,
        health,
        docs,
    ):
        app.include_router(surface.router)
    # Made once, when somebody asks.
    app.openapi = functools.cache(functools.partial(document, app))  # type: ignore[method-assign]
    _answer_errors(app)
    # The last one added is the outermost: the log shows paths as they came, all else sees those of the routes.
    refused = metrics.count_limited
    app.add_middleware(Places, bounds=bounds, refused=refused)
    app.add_middleware(Guard, callers=tokens, rates=Rates(bounds.requests_per_s, bounds.burst, refused))
    app.add_middleware(Auditor, control=control, logger=logger)
    app.add_middleware(Mounts)
    app.add_middleware(Heads)
    app.add_middleware(RequestLog, logger=logger)
    return app


@asynccontextmanager
async def _nothing(app: FastAPI) -> AsyncIterator[None]:
    yield


def _answer_errors(app: FastAPI) -> None:
    """Every error is a problem document, also those of the framework."""

    def problem(request: Request, error: Problem) -> Response:
        note(request, code=error.code)
        path = split_mount(request.url.path)[1]
        if error.code == Code.MODEL_REQUIRED:
            error.fields["urls"] = mount_urls(request, error.fields["known_models"])
        return error.response(path)

    async def on_problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return problem(request, error)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        wrong = Problem(
            422, Code.INVALID_FIELD, f"{where}: {fault['msg']}", hint=f"Correct `{fault['loc'][-1]}`."
        )
        return problem(request, wrong)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = Code.METHOD_NOT_ALLOWED if error.status_code == 405 else Code.NO_SUCH_PATH
        detail = f"{request.method} {request.url.path}: {error.detail}."
        return problem(
            request,
            Problem(
                error.status_code, code, detail, hint="See /docs for what there is.", headers=error.headers
            ),
        )

    async def on_reused(request: Request, error: Exception) -> Response:
        return problem(
            request, Problem(422, Code.IDEMPOTENCY_MISMATCH, str(error), hint="Send a new Idempotency-Key.")
        )

    async def on_unreachable(request: Request, error: Exception) -> Response:
        hint = "Mend what is named, if anything is; a dead one restarts by itself. Repeat after Retry-After."
        headers = {"Retry-After": "5"}
        return problem(
            request, Problem(503, Code.COORDINATOR_UNREACHABLE, str(error), hint=hint, headers=headers)
        )

    async def on_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the log shows it

    async def on_any(request: Request, error: Exception) -> Response:
        app.state.logger.error("unexpected error", path=request.url.path, exc_info=error)
        return problem(request, _unexpected(error))

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        Problem: on_problem,
        RequestValidationError: on_validation,
        HTTPException: on_http,
        KeyReused: on_reused,
        ControlUnreachable: on_unreachable,
        ClientGone: on_gone,
        ClientDisconnect: on_gone,  # amid its body
        Exception: on_any,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _unexpected(error: Exception) -> Problem:
    detail = f"{type(error).__name__}: {error}"
    return Problem(
        500, Code.INTERNAL, detail, hint="It is logged; repeat the request, and report it if it stays."
    )
