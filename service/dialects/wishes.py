"""What a request asks for, read from its query and its JSON body alike. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torpor.actors.messages import DrainMode, RestoreMode
from torpor.service.dialects.dialect import Dialect, Query, Tree
from torpor.service.dialects.tags import named_tags
from torpor.service.problems import Code, Problem

# vLLM's levels of sleep, by what becomes of memory; level 0 is a pause.
LEVELS: Mapping[int, Mapping[str, RestoreMode]] = {
    0: {},
    1: {"weights": RestoreMode.PINNED, "kv_cache": RestoreMode.NONE},
    2: {"weights": RestoreMode.NONE, "kv_cache": RestoreMode.NONE},
}
DEFAULT_LEVEL = 1

# What becomes of requests that run.
MODES: Mapping[str, DrainMode] = {
    "abort": DrainMode.ABORT,
    "wait": DrainMode.FINISH,
    "keep": DrainMode.FREEZE,
    "retract": DrainMode.FREEZE,
    "in_place": DrainMode.FREEZE,
}
MODES_OF: Mapping[Dialect, tuple[str, ...]] = {
    Dialect.VLLM: ("abort", "wait", "keep"),
    Dialect.RAY_SERVE: ("abort", "wait", "keep"),
    Dialect.SGLANG: ("abort", "retract", "in_place"),
}


@dataclass(frozen=True, slots=True)
class Wish:
    """named: the models that query and body name. ignored: JSON fields without a meaning here."""

    dialect: Dialect
    named: tuple[str, ...] = ()
    level: int | None = None
    mode: DrainMode | None = None
    tags: tuple[str, ...] | None = None
    ignored: tuple[str, ...] = ()


def read_wish(dialect: Dialect, query: Query, tree: Tree | None, uses: frozenset[str] = frozenset()) -> Wish:
    """uses: of tags, level and mode, and of a route's own fields, those that mean something to it.

    What says the same thing twice is heard once; what contradicts itself is a Problem.
    """
    fields = dict(tree or {})
    known = {"model", *uses}
    inner = fields
    if dialect is Dialect.RAY_SERVE and "options" in fields:
        inner = _options(fields)
        ignored = [name for name in fields if name not in ("model", "options")]
        ignored += [f"options.{name}" for name in inner if name not in uses]
    else:
        ignored = [name for name in fields if name not in known]
    named = {value for name in ("model", "id") for value in query.get(name, ()) if value}
    return Wish(
        dialect,
        tuple(sorted(named | _model_of(fields))),
        _level(query, inner) if "level" in uses else None,
        _mode(dialect, query, inner) if "mode" in uses else None,
        _tags(query, inner) if "tags" in uses else None,
        tuple(sorted(ignored)),
    )


def _options(fields: Tree) -> dict[str, Any]:
    options = fields["options"]
    if options is None:
        return {}
    if not isinstance(options, dict):
        detail = "`options` is to be an object."
        raise Problem(422, Code.INVALID_FIELD, detail, hint='Send {"options": {"level": 1}}.')
    return options


def _model_of(fields: Tree) -> set[str]:
    model = fields.get("model")
    if model is None:
        return set()
    if not isinstance(model, str):
        raise Problem(422, Code.INVALID_FIELD, "`model` is to be a name.", hint="Send one model's name.")
    return {model}


def _tags(query: Query, fields: Tree) -> tuple[str, ...] | None:
    named = named_tags(query.get("tags"), fields.get("tags"))
    return None if named is None else tuple(named)


def _one(name: str, query: Query, fields: Tree) -> str | None:
    """The value of a parameter that a query, a body, or both may give."""
    given = fields.get(name)
    if given is not None and (isinstance(given, bool) or not isinstance(given, str | int)):
        raise Problem(
            422, Code.INVALID_FIELD, f"`{name}` is neither a word nor a number.", hint=f"Correct `{name}`."
        )
    values = {*query.get(name, ()), *(() if given is None else (str(given),))}
    if len(values) > 1:
        told = " and ".join(sorted(values))
        raise Problem(
            422, Code.INVALID_FIELD, f"`{name}` is given as {told}.", hint=f"Send one value of `{name}`."
        )
    return next(iter(values), None)


def _level(query: Query, fields: Tree) -> int | None:
    given = _one("level", query, fields)
    if given is None:
        return None
    level = next((known for known in LEVELS if str(known) == given.strip()), None)
    if level is None:
        known = ", ".join(map(str, LEVELS))
        hint = f"Known levels: {known}. 0 pauses, 1 keeps the weights, 2 keeps nothing."
        raise Problem(422, Code.INVALID_FIELD, f"`level`: unknown level {given!r}", hint=hint)
    return level


def _mode(dialect: Dialect, query: Query, fields: Tree) -> DrainMode | None:
    given = _one("mode", query, fields)
    if given is None:
        return None
    known = list(MODES_OF[dialect])
    if given not in known:
        hint = f"Known modes: {', '.join(known)}."
        raise Problem(422, Code.UNKNOWN_MODE, f"`mode`: unknown mode {given!r}", hint=hint, known_modes=known)
    return MODES[given]
