"""Which dialect a request speaks, and what its words mean: pure functions, by table and by any input (F21)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.actors.messages import DrainMode, OnConflict
from torpor.service.dialects.dialect import MANNERS, Answer, Dialect, dialect_of, on_conflict_of
from torpor.service.dialects.mounts import split_mount
from torpor.service.dialects.tags import SCHEDULING, Tags, named_tags, read_tags
from torpor.service.dialects.wishes import LEVELS, read_wish
from torpor.service.problems import Problem

NATIVE, VLLM, RAY, SGLANG = Dialect.NATIVE, Dialect.VLLM, Dialect.RAY_SERVE, Dialect.SGLANG

DIALECTS: list[tuple[dict[str, list[str]], dict[str, Any] | None, Dialect]] = [
    ({}, None, NATIVE),
    ({}, {}, NATIVE),
    ({}, {"tags": ["weights"]}, NATIVE),
    ({}, {"model": "chat", "drain": {"mode": "abort"}}, NATIVE),
    ({"id": ["chat"]}, None, NATIVE),
    ({"trace": ["1"], "level2": ["x"]}, None, NATIVE),
    ({"level": ["1"]}, None, VLLM),
    ({"level": [""]}, None, VLLM),
    ({"mode": ["keep"]}, None, VLLM),
    ({"tags": ["weights"]}, {"restore": {}}, VLLM),
    ({}, {"level": "1"}, VLLM),
    ({}, {"mode": "wait"}, VLLM),
    ({}, {"level": None}, VLLM),
    ({}, {"options": {"level": 1}, "model": "chat"}, RAY),
    ({}, {"options": {}}, RAY),
    ({"level": ["2"]}, {"options": None}, RAY),
]


@pytest.mark.parametrize(("query", "tree", "expected"), DIALECTS)
def test_the_marks_of_a_request_say_its_dialect(
    query: dict[str, list[str]], tree: dict[str, Any] | None, expected: Dialect
) -> None:
    assert dialect_of(query, tree) is expected
    if expected is NATIVE:
        assert dialect_of(query, tree, VLLM) is VLLM, "a path of vLLM's own needs no mark"


def test_only_the_native_dialect_is_strict_and_refuses_in_a_conflict() -> None:
    """C4, and what each dialect drains and answers."""
    assert set(MANNERS) == set(Dialect)
    for dialect, manners in MANNERS.items():
        native = dialect is NATIVE
        assert manners.strict is native
        assert on_conflict_of(dialect, {}) is (OnConflict.REJECT if native else OnConflict.WAIT)
        assert on_conflict_of(dialect, None) is OnConflict.WAIT
    drains = {dialect: manners.drain for dialect, manners in MANNERS.items()}
    assert drains == {
        NATIVE: DrainMode.FINISH,
        VLLM: DrainMode.ABORT,
        RAY: DrainMode.ABORT,
        SGLANG: DrainMode.FINISH,
        Dialect.TENSORRT_LLM: DrainMode.FINISH,
    }
    empty = {dialect for dialect, manners in MANNERS.items() if manners.answer is Answer.EMPTY}
    assert empty == {VLLM, RAY}


WISHES: list[tuple[Dialect, dict[str, list[str]], dict[str, Any] | None, dict[str, Any]]] = [
    (VLLM, {"level": ["2"], "mode": ["wait"]}, None, {"level": 2, "mode": DrainMode.FINISH}),
    (VLLM, {"level": ["1", "1"]}, {"level": 1}, {"level": 1}),
    (VLLM, {}, {"level": "0"}, {"level": 0}),
    (VLLM, {"mode": ["keep"]}, None, {"mode": DrainMode.FREEZE}),
    (VLLM, {"tags": ["weights", "kv_cache"]}, None, {"tags": ("weights", "kv_cache")}),
    (VLLM, {"tags": ["weights, kv_cache"]}, None, {"tags": ("weights", "kv_cache")}),
    (VLLM, {"tags": ["weights"]}, {"tags": ["weights"]}, {"tags": ("weights",)}),
    (VLLM, {"id": ["chat"], "x": ["y"]}, None, {"named": ("chat",), "ignored": ()}),
    (VLLM, {"id": ["chat"], "model": ["chat"]}, {"model": "draft"}, {"named": ("chat", "draft")}),
    (VLLM, {}, {"level": 1, "drain": {}, "why": 1}, {"ignored": ("drain", "why")}),
    (RAY, {}, {"model": "chat", "options": {"level": 2}}, {"named": ("chat",), "level": 2}),
    (RAY, {}, {"options": {"tags": ["weights"], "x": 1}, "y": 2}, {"ignored": ("options.x", "y")}),
    (RAY, {}, {"options": None}, {"level": None, "tags": None}),
    (SGLANG, {}, {"tags": None}, {"tags": None}),
    (SGLANG, {}, {"mode": "retract"}, {"mode": DrainMode.FREEZE}),
    (SGLANG, {}, {"tags": "weights"}, {"tags": ("weights",)}),
]
ALL = frozenset({"tags", "level", "mode"})


@pytest.mark.parametrize(("dialect", "query", "tree", "expected"), WISHES)
def test_query_and_body_say_the_same_things(
    dialect: Dialect,
    query: dict[str, list[str]],
    tree: dict[str, Any] | None,
    expected: dict[str, Any],
) -> None:
    """F21: unknown, missing and repeated fields, in both forms."""
    wish = read_wish(dialect, query, tree, ALL)
    assert {name: getattr(wish, name) for name in expected} == expected


WRONG: list[tuple[Dialect, dict[str, list[str]], dict[str, Any] | None, int, str]] = [
    (VLLM, {"level": ["3"]}, None, 422, "invalid_field"),
    (VLLM, {"level": ["one"]}, None, 422, "invalid_field"),
    (VLLM, {"level": ["1", "2"]}, None, 422, "invalid_field"),
    (VLLM, {"level": ["1"]}, {"level": 2}, 422, "invalid_field"),
    (VLLM, {}, {"level": True}, 422, "invalid_field"),
    (VLLM, {}, {"level": [1]}, 422, "invalid_field"),
    (VLLM, {"mode": ["freeze"]}, None, 422, "unknown_mode"),
    (SGLANG, {}, {"mode": "keep"}, 422, "unknown_mode"),
    (VLLM, {"tags": [""]}, None, 400, "empty_tags"),
    (VLLM, {"tags": [","]}, None, 400, "empty_tags"),
    (SGLANG, {}, {"tags": []}, 400, "empty_tags"),
    (RAY, {}, {"options": {"tags": []}}, 400, "empty_tags"),
    (RAY, {}, {"options": [1]}, 422, "invalid_field"),
    (SGLANG, {}, {"tags": [1]}, 422, "invalid_field"),
    (SGLANG, {}, {"tags": {}}, 422, "invalid_field"),
    (SGLANG, {}, {"model": 1}, 422, "invalid_field"),
]


@pytest.mark.parametrize(("dialect", "query", "tree", "status", "code"), WRONG)
def test_what_contradicts_itself_or_means_nothing_is_told(
    dialect: Dialect, query: dict[str, list[str]], tree: dict[str, Any] | None, status: int, code: str
) -> None:
    with pytest.raises(Problem) as caught:
        read_wish(dialect, query, tree, ALL)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert caught.value.hint


HAS = ("kv_cache", "weights")
TAGS: list[tuple[list[str] | None, Tags]] = [
    (None, Tags(None, True)),
    (["weights"], Tags(("weights",), False)),
    (["model_weights", "weights"], Tags(("weights",), False)),
    (["kv_cache", "cuda_graph"], Tags(("kv_cache",), False)),
    (["cuda_graph"], Tags((), False)),
    (["sampler", "draft_model"], Tags((), False)),
    ([SCHEDULING], Tags((), True)),
    (["weights", SCHEDULING], Tags(("weights",), True)),
]


@pytest.mark.parametrize(("named", "expected"), TAGS)
def test_other_engines_names_are_understood_and_what_a_model_lacks_is_nothing_to_do(
    named: list[str] | None, expected: Tags
) -> None:
    assert read_tags(named, HAS) == expected


def test_a_name_of_the_model_s_own_goes_before_an_alias() -> None:
    assert read_tags(["model"], ("model", "weights")).memory == ("model",)


def test_only_unknown_names_are_refused_with_the_known_ones_told() -> None:
    with pytest.raises(Problem) as caught:
        read_tags(["weights", "wieghts"], HAS)
    assert (caught.value.status, caught.value.code) == (400, "unknown_tag")
    assert "wieghts" in caught.value.detail and "kv_cache" in caught.value.hint


@pytest.mark.parametrize(
    ("path", "model", "inner"),
    [
        ("/sleep", None, "/sleep"),
        ("/reset_prefix_cache/", None, "/reset_prefix_cache"),
        ("/", None, "/"),
        ("/m/chat/sleep", "chat", "/sleep"),
        ("/m/chat/v1/models/", "chat", "/v1/models"),
        ("/m/chat", "chat", "/"),
        ("/m/", None, "/m"),
        ("/m//sleep", None, "/m//sleep"),
        ("/models/m/sleep", None, "/models/m/sleep"),
    ],
)
def test_a_mount_is_taken_off_a_path(path: str, model: str | None, inner: str) -> None:
    assert split_mount(path) == (model, inner)


words = st.sampled_from(["level", "mode", "tags", "options", "model", "id", "x"]) | st.text(max_size=6)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
telling = st.sampled_from(["0", "1", "2", 1, "abort", "keep", "weights", "scheduling", "", ","])
values = st.recursive(
    scalars | telling, lambda some: st.lists(some, max_size=3) | st.dictionaries(words, some, max_size=3)
)
queries = st.dictionaries(
    words, st.lists(st.text(max_size=8) | st.sampled_from(["1", "weights"]), max_size=3)
)
trees = st.none() | st.dictionaries(words, values, max_size=5)


@settings(max_examples=200, deadline=None)
@given(queries, trees, st.sampled_from(list(Dialect)))
def test_whatever_is_sent_is_understood_or_refused_by_a_problem(
    query: dict[str, list[str]], tree: dict[str, Any] | None, otherwise: Dialect
) -> None:
    """F21: never another exception."""
    dialect = dialect_of(query, tree, otherwise)
    try:
        wish = read_wish(
            dialect, query, tree, ALL - ({"mode"} if dialect in (NATIVE, Dialect.TENSORRT_LLM) else set())
        )
        tags = read_tags(wish.tags, HAS)
    except Problem as problem:
        assert 400 <= problem.status < 500 and problem.hint
    else:
        assert wish.level is None or wish.level in LEVELS
        assert set(tags.memory or ()) <= set(HAS)
        assert wish.tags is None or wish.tags


@settings(max_examples=100, deadline=None)
@given(st.none() | st.lists(st.text(max_size=8), max_size=4), values)
def test_tags_are_a_list_of_names_or_a_problem(in_query: list[str] | None, in_body: Any) -> None:
    try:
        named = named_tags(in_query, in_body)
    except Problem as problem:
        assert problem.status in (400, 422)
    else:
        assert named is None or (named and all(tag == tag.strip() and tag for tag in named))
