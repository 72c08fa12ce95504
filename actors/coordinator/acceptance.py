"""Whether a request may become an operation now: the rules, as functions of what the coordinator holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torpor.actors.coordinator.holds import refusal as held
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.messages import (
    Kind,
    ModelState,
    OnConflict,
    Operation,
    OperationRequest,
    Origin,
    Refusal,
    RejectCode,
)

MAX_WAITING = 64  # operations a model
_OF_RANKS = (Kind.RECOVER, Kind.DELETE)  # they make and end ranks
# In these a request of the kind is refused at once, whoever would wait or not; and where waiting helps.
_WRONG = (ModelState.LOADING, ModelState.RECOVERING, ModelState.FAILED)
_NEVER_WRONG = {(Kind.RECOVER, ModelState.FAILED), *((Kind.DELETE, state) for state in _WRONG)}


def as_configured(runtime: ModelRuntime | None, request: OperationRequest) -> OperationRequest:
    """With the model's own answer to whether to verify, where the request gives none.

    The last hold to go takes everything with it: a tag that slept on under nobody's hold would help nobody.
    """
    if request.releases:
        request = replace(request, tags=None)
    if not request.kind.has_tags:
        request = replace(request, tags=())
    if request.verify is not None:
        return request
    verify = request.kind is Kind.SLEEP and runtime is not None and runtime.config.verify
    return replace(request, verify=verify)


def in_force(runtime: ModelRuntime, request: OperationRequest) -> OperationRequest:
    """With the model's policy as it is when the operation is carried out. Not part of what was asked for: a key that
    comes again, and a request that would join, are compared without it."""
    if request.kind is not Kind.WAKE or request.on_discard is not None:
        return request
    return replace(request, on_discard=runtime.config.on_discard)


def refusal_of(
    models: Mapping[str, ModelRuntime], request: OperationRequest, makes_ranks: bool
) -> Refusal | None:
    """Why there is to be no such operation, whatever else runs; None = it may be."""
    runtime = models.get(request.model)
    if runtime is None:
        names = ", ".join(sorted(models)) or "none"
        return Refusal(RejectCode.UNKNOWN_MODEL, f"no model {request.model!r}; there are: {names}")
    if request.kind in _OF_RANKS and not makes_ranks:
        return Refusal(RejectCode.REFUSED, f"no {request.kind} here: this coordinator makes no ranks")
    if runtime.deleting and request.kind is not Kind.DELETE:
        return Refusal(RejectCode.UNKNOWN_MODEL, f"{request.model!r} is being deleted")
    changed = changed_since(runtime, request)
    if changed is not None:
        return changed
    known = runtime.published.tags
    for tag in (*(request.tags or ()), *request.restore):
        if known and tag not in known:
            text = f"no tag {tag!r}; {request.model!r} has {', '.join(known)}"
            return Refusal(RejectCode.UNKNOWN_TAG, text, tag)
    return _wrong_state(runtime, request) or held(runtime.published, request)


def changed_since(runtime: ModelRuntime, request: OperationRequest) -> Refusal | None:
    """The model is no longer what the caller has looked at; asked again of what has waited for its turn."""
    now = runtime.published.generation
    if request.generation in (None, now):
        return None
    text = (
        f"{request.model!r} has generation {now}, not {request.generation}: it has changed since you looked"
    )
    return Refusal(RejectCode.GENERATION, text)


def unknown_hold(request: OperationRequest, sleep: Operation | None) -> Refusal | None:
    """sleep: the operation that the request names as a hold's, if there is one; its hold may have ended since."""
    if sleep is not None and (sleep.kind, sleep.model) == (Kind.SLEEP, request.model):
        return None
    why = f"{request.releases!r} is no sleep of {request.model!r}; name the operation of the sleep whose hold is to end"
    return Refusal(RejectCode.REFUSED, why)


def _wrong_state(runtime: ModelRuntime, request: OperationRequest) -> Refusal | None:
    state = runtime.state()
    if state not in _WRONG or (request.kind, state) in _NEVER_WRONG:
        return None
    if request.on_conflict is OnConflict.WAIT and state is not ModelState.FAILED:
        return None
    if request.kind in _OF_RANKS and runtime.joinable(request):
        return None  # what is asked for is on its way
    why = runtime.published.failed or runtime.doubt
    return Refusal(RejectCode.WRONG_STATE, f"{request.model!r} is {state}{f': {why}' if why else ''}")


def conflict_of(runtime: ModelRuntime, request: OperationRequest) -> Refusal | None:
    """What runs already and is in the way of a request that would not wait."""
    if request.origin is Origin.CALLER:
        # What nobody asked for is in nobody's way: it is waited for.
        running = next((run for run in runtime.queue if not run.request.origin.automatic), None)
    else:
        running = runtime.running
    if running is None:
        return None
    if request.on_conflict is OnConflict.REJECT:
        what = f"operation {running.operation.id} ({running.request.kind}) runs on {request.model!r}"
        return Refusal(RejectCode.CONFLICT, f"{what}; wait for it, cancel it, or ask with on_conflict wait")
    if len(runtime.queue) >= MAX_WAITING:
        text = f"{MAX_WAITING} operations wait for {request.model!r}; try later"
        return Refusal(RejectCode.CONFLICT, text)
    return None
