"""Request bodies of the native surface: read, checked, and turned into an OperationRequest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request

from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    Kind,
    MakeRoom,
    OnConflict,
    OnDiscard,
    OnExpiry,
    OperationRequest,
    RejectCode,
    RestoreMode,
)
from torpor.service.context import context_of
from torpor.service.json_text import parse_object
from torpor.service.limits.body import read_bounded
from torpor.service.problems import Code, Problem

MODES = [mode.value for mode in RestoreMode]

MIN_LEASE_S = 1.0  # renewed three times in it, over a network
Seconds = Annotated[float, Field(gt=0, le=86400)]
Name = Annotated[str, Field(max_length=256)]  # of a tag or an operation: their records are kept


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class DrainBody(_Body):
    """freeze_timeout_s: of mode freeze; its requests end with `abort` after so long. Without one: never."""

    mode: Literal["finish", "abort", "freeze", "if_idle"] = "finish"
    timeout_s: Seconds | None = None
    freeze_timeout_s: Seconds | None = None

    @model_validator(mode="after")
    def _only_a_freeze_has_a_limit(self) -> DrainBody:
        if self.freeze_timeout_s is not None and self.mode != "freeze":
            raise ValueError(f"freeze_timeout_s goes with mode freeze, not {self.mode}")
        return self


class OperationBody(_Body):
    """What sleeps and wakes have in common."""

    model: str | None = None
    models: list[str] | Literal["*"] | None = None
    tags: Annotated[list[Name], Field(max_length=256)] | None = None
    verify: bool | None = None  # None: as the model is configured
    dry_run: bool = False
    on_conflict: Literal["reject", "wait"] = "reject"
    timeout_s: Seconds | None = None


class WakeBody(OperationBody):
    """on_discard: of weights that come back without contents; by default as the model is configured.

    releases: the operation of a sleep, whose hold alone is ended; the model wakes when nobody else holds it.
    """

    make_room: Literal["none", "idle"] = "none"  # idle: put idle neighbours to sleep when there is no memory
    on_discard: Literal["reload", "wait"] | None = None
    accept_stale_weights: bool = False  # weights that were updated may come back as their source has them
    releases: Annotated[Name, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _a_hold_ends_whole(self) -> Self:
        if self.releases is not None and self.tags is not None:
            raise ValueError("releases ends a hold, which wakes every tag with the last one; leave tags out")
        return self


class SleepBody(OperationBody):
    """A sleep is a hold, unless wake_on_request; the hold may have a lease, renewed by the operation's id."""

    restore: dict[Name, Literal["none", "memset", "cpu", "pinned", "disk"]] = Field(
        default_factory=dict, max_length=256
    )
    drain: DrainBody = Field(default_factory=DrainBody)
    overflow: Literal["reject", "evict"] = "reject"
    wake_on_request: bool = False
    lease_s: Annotated[float, Field(ge=MIN_LEASE_S, le=86400)] | None = None
    on_expiry: Literal["keep", "wake"] | None = None

    @model_validator(mode="after")
    def _one_lease(self) -> Self:
        if self.wake_on_request and self.lease_s is not None:
            raise ValueError("wake_on_request makes it no hold, and lease_s is a hold's; leave one out")
        if self.on_expiry is not None and self.lease_s is None:
            raise ValueError("on_expiry is about a lease; give lease_s with it")
        return self

    @model_validator(mode="after")
    def _keeps_what_sleeps(self) -> Self:
        beside = sorted(set(self.restore) - set(self.tags)) if self.tags is not None else []
        if beside:
            raise ValueError(
                f"restore names {', '.join(beside)}, and tags do not; add it there, or leave it out"
            )
        return self


BodyT = TypeVar("BodyT", bound=BaseModel)


async def read_json(request: Request) -> dict[str, Any] | None:
    """The body as an object, None when it is empty. The content type is not looked at."""
    context = context_of(request)
    raw = await read_bounded(request, context.bounds, context.metrics.count_limited)
    if not raw.strip():
        return None
    return parse_object(raw)


def parse(shape: type[BodyT], tree: dict[str, Any] | None) -> BodyT:
    """`tree` as a body. Raises a Problem that names the field and what is known."""
    tree = tree or {}
    if tree.get("tags") == []:
        raise Problem(
            400, Code.EMPTY_TAGS, "`tags` is empty.", hint="Leave `tags` out for every tag, or name some."
        )
    try:
        return shape.model_validate(tree)
    except ValidationError as error:
        raise _problem(shape, error) from None


def _problem(shape: type[BaseModel], error: ValidationError) -> Problem:
    faults = error.errors()
    unknown = [fault["loc"] for fault in faults if fault["type"] == "extra_forbidden"]
    if unknown:
        names = ", ".join(dotted(loc) for loc in unknown)
        known = sorted((_drain_of(shape) if unknown[0][0] == "drain" else shape).model_fields)
        hint = f"Known fields: {', '.join(known)}."
        return Problem(422, Code.UNKNOWN_FIELD, f"Unknown field: {names}", hint=hint, known_fields=known)
    fault = most_telling(faults)
    if not fault["loc"]:
        message = fault["msg"].removeprefix("Value error, ")
        return Problem(422, Code.INVALID_FIELD, message, hint="Correct the fields that are named.")
    where, given = dotted(fault["loc"]), fault["input"]
    if fault["type"] == "literal_error" and fault["loc"][0] in ("restore", "drain"):
        known = MODES if fault["loc"][0] == "restore" else _drain_modes(shape)
        hint = f"Known modes: {', '.join(known)}."
        return Problem(
            422, Code.UNKNOWN_MODE, f"{where}: unknown mode {given!r}", hint=hint, known_modes=known
        )
    message = fault["msg"].removeprefix("Value error, ")
    return Problem(422, Code.INVALID_FIELD, f"{where}: {message}", hint=f"Correct the field `{where}`.")


def _drain_of(shape: type[BaseModel]) -> type[BaseModel]:
    """A sleep's drain knows a mode that a last one does not."""
    drain: Any = shape.model_fields["drain"].annotation
    return cast("type[BaseModel]", drain)


def _drain_modes(shape: type[BaseModel]) -> list[str]:
    return list(get_args(_drain_of(shape).model_fields["mode"].annotation))


# Where a field may have several types, pydantic adds the one that it tried to the path.
_TRIED_TYPE = re.compile(r"str|int|\w+\[.*\]")


def dotted(loc: tuple[int | str, ...]) -> str:
    """The place of a fault in the body, as its sender knows it."""
    return ".".join(str(part) for part in loc if isinstance(part, int) or not _TRIED_TYPE.fullmatch(part))


def most_telling(faults: Sequence[Any]) -> Any:
    """Of several types that were tried, the one that was meant fails by its contents."""
    return next((fault for fault in faults if not fault["type"].endswith("_type")), faults[0])


def to_request(
    kind: Kind,
    model: str,
    body: OperationBody,
    *,
    default_conflict: OnConflict,
) -> OperationRequest:
    """What the coordinator is asked. default_conflict counts when the body does not name `on_conflict`."""
    drain, restore, overflow = DrainSpec(), {}, "reject"
    own: dict[str, Any] = {}
    if isinstance(body, WakeBody):
        own = {"make_room": MakeRoom(body.make_room), "accept_stale_weights": body.accept_stale_weights}
        own["releases"] = body.releases or ""
        own["on_discard"] = OnDiscard(body.on_discard) if body.on_discard is not None else None
    if isinstance(body, SleepBody):
        own = {"wake_on_request": body.wake_on_request, "lease_s": body.lease_s}
        own["on_expiry"] = OnExpiry(body.on_expiry or OnExpiry.KEEP)
        drain = DrainSpec(DrainMode(body.drain.mode), body.drain.timeout_s, body.drain.freeze_timeout_s)
        restore = {tag: RestoreMode(mode) for tag, mode in body.restore.items()}
        overflow = body.overflow
    named = "on_conflict" in body.model_fields_set
    return OperationRequest(
        kind=kind,
        model=model,
        tags=tuple(dict.fromkeys(body.tags)) if body.tags is not None else None,
        restore=restore,
        drain=drain,
        overflow=overflow,
        verify=body.verify,
        dry_run=body.dry_run,
        on_conflict=OnConflict(body.on_conflict) if named else default_conflict,
        timeout_s=body.timeout_s,
        **own,
    )


def targets(body: OperationBody, path_model: str | None, known: list[str]) -> tuple[list[str], bool]:
    """The models meant, and whether the answer fans out. Raises a Problem that lists the known ones."""
    named = [name for name in ("model", "models") if getattr(body, name) is not None]
    if path_model is not None and named and (named != ["model"] or body.model != path_model):
        detail = f"The URL names {path_model!r}, and the body names something else in `{named[-1]}`."
        raise Problem(422, Code.INVALID_FIELD, detail, hint="Name the model once.")
    if len(named) == 2:
        raise Problem(
            422, Code.INVALID_FIELD, "`model` and `models` exclude each other.", hint="Send one of them."
        )
    if body.models == []:
        raise Problem(422, Code.INVALID_FIELD, "`models` is empty.", hint='Name some, or send "*" for all.')
    fan_out = body.models is not None or body.model == "*" or path_model == "*"
    wanted = path_model or body.model or body.models
    if fan_out:
        chosen = known if wanted == "*" else list(dict.fromkeys(wanted or []))
    elif wanted is None:
        if len(known) != 1:
            raise model_required(known)
        chosen = known
    else:
        chosen = [str(wanted)]
    for name in chosen:
        if name not in known:
            raise unknown_model(name, known)
    return chosen, fan_out


def model_required(known: list[str]) -> Problem:
    """None was named, and there is not just one."""
    detail, hint = f"There are {len(known)} models; say which one.", f"Known models: {', '.join(known)}."
    if not known:
        detail, hint = "There is no model.", "Make one with torpor apply."
    return Problem(400, Code.MODEL_REQUIRED, detail, hint=hint, known_models=known)


def unknown_model(name: str, known: list[str]) -> Problem:
    hint = f"Known models: {', '.join(known) or 'none'}."
    return Problem(
        404,
        RejectCode.UNKNOWN_MODEL,
        f"There is no model {name!r}.",
        hint=hint,
        known_models=known,
        param="model",
    )
