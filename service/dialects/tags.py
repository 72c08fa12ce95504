"""Names of memory as other engines' clients say them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torpor.actors.messages import RejectCode
from torpor.service.problems import Code, Problem

# Tags that any model may have: one that this model lacks has nothing to do, and is no mistake.
COMMON_TAGS = frozenset({"weights", "kv_cache", "cuda_graph", "workspace"})
SCHEDULING = "scheduling"  # no memory: that requests are let in

ALIASES: Mapping[str, str] = {
    "weight": "weights",
    "model": "weights",
    "model_weights": "weights",
    "kv-cache": "kv_cache",
    "cuda_graphs": "cuda_graph",
}
# Memory of other engines that ours have no like of, or have within the tags above.
ELSEWHERE = frozenset(
    {"draft_model", "draft_model_weights", "drafter", "executor_extra", "guided_decoder", "model_extra"}
    | {"sampler", "spec_resource_manager"}
)


@dataclass(frozen=True, slots=True)
class Tags:
    """memory: of the model, None for all that it has, empty for none. scheduling: it is about being let in, too."""

    memory: tuple[str, ...] | None
    scheduling: bool


def named_tags(values: Sequence[str] | None, given: Any) -> list[str] | None:
    """From a query's values and a JSON body's field, either of which may be missing. None: neither names any.

    Raises a Problem for an empty list, and for what is no list of names.
    """
    if isinstance(given, str):
        given = [given]
    if given is not None and not (isinstance(given, list) and all(isinstance(tag, str) for tag in given)):
        detail = "`tags` is to be a list of names."
        raise Problem(422, Code.INVALID_FIELD, detail, hint='Send {"tags": ["weights"]}, or leave it out.')
    if values is None and given is None:
        return None
    parts = [part for value in values or () for part in value.split(",")] + list(given or ())
    named = list(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not named:
        detail = "`tags` is empty."
        raise Problem(400, Code.EMPTY_TAGS, detail, hint="Leave `tags` out for every tag, or name some.")
    return named


def read_tags(named: Sequence[str] | None, of_model: Collection[str]) -> Tags:
    """What the names mean for a model with these tags. Raises a Problem for one that nobody knows."""
    if named is None:
        return Tags(None, scheduling=True)
    meant = list(dict.fromkeys(ALIASES.get(tag, tag) if tag not in of_model else tag for tag in named))
    unknown = [tag for tag in meant if tag not in {*of_model, *COMMON_TAGS, *ELSEWHERE, SCHEDULING}]
    if unknown:
        known = sorted({*of_model, *COMMON_TAGS, SCHEDULING})
        detail = f"Unknown tag: {', '.join(unknown)}"
        hint = f"Known tags: {', '.join(known)}."
        raise Problem(400, RejectCode.UNKNOWN_TAG, detail, hint=hint, known_tags=known)
    # What is still loading has told no tags yet.
    has = of_model or COMMON_TAGS
    return Tags(tuple(tag for tag in meant if tag in has), scheduling=SCHEDULING in meant)
