"""The OpenAPI document is true of every answer to requests made by chance (F21)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_inside import URL, Inside, inside

from torpor.actors.config import ModelConfig
from torpor.actors.messages import ModelState

schemathesis = pytest.importorskip("schemathesis", reason="`make setup` installs it")

ROOT = Path(__file__).parents[2]
KEPT = json.loads((ROOT / "docs" / "openapi.json").read_text(encoding="utf-8"))
SCHEMA = schemathesis.openapi.from_dict(KEPT)
OPERATIONS = {one.ok().label: one.ok() for one in SCHEMA.get_all_operations()}
NAMES = {"model": "chat", "name": "chat", "operation_id": "op-1"}
BUSY = {
    "gate_closed",
    "queue_full",
    "queue_timeout",
    "drain_timeout",
    "stage_timeout",
    "device_memory",
    "host_memory",
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("openapi"), making=True) as made:
        yield made


@pytest.fixture(scope="module")
def http(house: Inside) -> Iterator[httpx.Client]:
    with httpx.Client(transport=house.lent(), base_url=URL, timeout=20) as client:
        yield client


def cases(operation: Any) -> st.SearchStrategy[Any]:
    """As the document has them, the same on a model that there is, and such as break it."""
    modes = schemathesis.GenerationMode
    names = {one["name"] for one in operation.definition.raw.get("parameters", []) if one["in"] == "path"}
    there = operation.as_strategy(path_parameters={name: NAMES[name] for name in names} or None)
    there = there.flatmap(lambda case: st.sampled_from((True, False)).map(lambda known: to_chat(case, known)))
    return st.one_of(
        operation.as_strategy(), there, there, operation.as_strategy(generation_mode=modes.NEGATIVE)
    )


def to_chat(case: Any, known: bool) -> Any:
    """Words that mean something: a body made by chance names models and tags that nobody has."""
    if known and isinstance(case.body, dict):
        if "model" in case.body:
            case.body = case.body | {"model": "chat"}
        if case.body.get("tags"):
            case.body = case.body | {"tags": ["kv_cache"]}
        case.body.pop("models", None)
    return case


def ask(http: httpx.Client, case: Any) -> httpx.Response:
    import requests

    asked = case.as_transport_kwargs(base_url=URL)
    known = {
        name: asked[name] for name in ("method", "url", "headers", "params", "json", "data") if name in asked
    }
    prepared = requests.Request(**known).prepare()
    body = prepared.body.encode() if isinstance(prepared.body, str) else prepared.body
    # As bytes: what is beyond ASCII travels as it would from a careless client.
    headers = [
        (name.encode(), value if isinstance(value, bytes) else str(value).encode("latin-1"))
        for name, value in prepared.headers.items()
        if name.lower() != "content-length"
    ]
    request = http.build_request(prepared.method, prepared.url, headers=headers, content=body)
    answer = http.send(request, stream=True)
    if answer.headers.get("content-type", "").startswith("text/event-stream") and case.path == "/events":
        answer.close()  # it has no end
        told = httpx.Response(answer.status_code, headers=answer.headers, content=b"", request=request)
        told.elapsed = timedelta(0)
        return told
    answer.read()
    return answer


def check(case: Any, answer: httpx.Response) -> None:
    from schemathesis.specs.openapi import checks

    if answer.status_code >= 500:
        assert answer.headers["content-type"] == "application/problem+json", answer.text
        assert answer.json()["code"] in BUSY, answer.text
    case.validate_response(
        answer,
        checks=[
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_headers_conformance,
            checks.response_schema_conformance,
        ],
    )


def as_before(house: Inside) -> None:
    async def reset() -> None:
        control = house.rig.coordinator
        if not await control.models():
            await control.create(ModelConfig(name="chat"))

    house.transport.run(reset())
    with house.client() as client:
        view = client.model("chat")
        if view["paused"]:
            client.unpause("chat", on_conflict="wait")
        if view["state"] == ModelState.ASLEEP:
            client.wake("chat", on_conflict="wait")


def try_cases(house: Inside, http: httpx.Client, label: str, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases(OPERATIONS[label]))
    def run(case: Any) -> None:
        try:
            check(case, ask(http, case))
        finally:
            as_before(house)

    run()


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_no_request_gets_a_server_error_or_an_undocumented_answer(
    house: Inside, http: httpx.Client, label: str
) -> None:
    try_cases(house, http, label, examples=6)


@pytest.mark.long
@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_nor_do_hundreds_of_them(house: Inside, http: httpx.Client, label: str) -> None:
    try_cases(house, http, label, examples=300)
