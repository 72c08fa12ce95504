"""Which dialect a request speaks, and what each takes for granted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torpor.actors.messages import DrainMode, OnConflict

Query = Mapping[str, Sequence[str]]  # all values of each parameter, in their order
Tree = Mapping[str, Any]  # a JSON body


class Dialect(StrEnum):
    NATIVE = "native"
    VLLM = "vllm"
    SGLANG = "sglang"
    TENSORRT_LLM = "tensorrt_llm"
    RAY_SERVE = "ray_serve"


class Answer(StrEnum):
    """What a call that has succeeded answers with."""

    OPERATION = "operation"  # the finished operation as JSON
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Manners:
    """drain and on_conflict: where a request names none. strict: unknown JSON fields are refused, not ignored.

    wake_ends_pause: a wake of everything is the end of a pause, too.
    """

    drain: DrainMode
    on_conflict: OnConflict
    strict: bool
    answer: Answer
    wake_ends_pause: bool = False


MANNERS: Mapping[Dialect, Manners] = {
    Dialect.NATIVE: Manners(DrainMode.FINISH, OnConflict.REJECT, True, Answer.OPERATION),
    Dialect.VLLM: Manners(DrainMode.ABORT, OnConflict.WAIT, False, Answer.EMPTY, wake_ends_pause=True),
    Dialect.SGLANG: Manners(DrainMode.FINISH, OnConflict.WAIT, False, Answer.OPERATION),
    Dialect.TENSORRT_LLM: Manners(DrainMode.FINISH, OnConflict.WAIT, False, Answer.OPERATION),
    Dialect.RAY_SERVE: Manners(DrainMode.ABORT, OnConflict.WAIT, False, Answer.EMPTY, wake_ends_pause=True),
}


def dialect_of(query: Query, tree: Tree | None, otherwise: Dialect = Dialect.NATIVE) -> Dialect:
    """Of a path that several dialects have. otherwise: where the request shows none of their marks."""
    fields = tree or {}
    if "options" in fields:
        return Dialect.RAY_SERVE
    if "tags" in query or any(mark in place for mark in ("level", "mode") for place in (query, fields)):
        return Dialect.VLLM
    return otherwise


def on_conflict_of(dialect: Dialect, tree: Tree | None) -> OnConflict:
    """An empty body is what simple clients send: they want it done, not a conflict."""
    return OnConflict.WAIT if tree is None else MANNERS[dialect].on_conflict
