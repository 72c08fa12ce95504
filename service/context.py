"""What the routes of one app share: handed in by the factory, found again on the request."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from torpor.actors.ports import Control
from torpor.service.admission import Admission
from torpor.service.gate.patience import PatientInference
from torpor.service.limits.bounds import Bounds
from torpor.service.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Context:
    control: Control
    inference: PatientInference
    admission: Admission
    metrics: Metrics
    clock: Callable[[], float] = time.time
    bounds: Bounds = field(default_factory=Bounds)
    new_id: Callable[[], str] = field(default=lambda: uuid.uuid4().hex)
    probe_timeout_s: float = 2.0
    token_timeout_s: float = 20.0  # for a model to make the token of a probe; as SGLang's
    keep_alive_s: float = 10.0  # of silence in a stream, until it gets a comment
    ending: asyncio.Event = field(default_factory=asyncio.Event)  # set: what has no end of its own ends
    metrics_timeout_s: float = 5.0  # a rank that is silent keeps a listing waiting for some seconds


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context
