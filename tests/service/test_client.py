"""Both Python clients, against the app in this process and against nobody."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from service_process import ServiceProcess, running
from service_rig import Rig

from torpor.actors.coordinator.memory import Fault
from torpor.service import (
    AsyncClient,
    BadRequest,
    Client,
    ConnectionFailed,
    Failed,
    NotFound,
    ProblemError,
    Rejected,
    Unavailable,
)
from torpor.service.problems import Problem, openai_error

HERE = "http://torpor.test"


@pytest.fixture
def client(rig: Rig) -> AsyncClient:
    return AsyncClient(HERE, transport=httpx.ASGITransport(rig.app, raise_app_exceptions=False))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running(tmp_path_factory.mktemp("client")) as process:
        yield process


def test_the_blocking_client_walks_through_the_main_job(service: ServiceProcess) -> None:
    with Client(service.url) as client:
        answer = client.chat("chat", "Capital of France?", temperature=0, return_token_ids=True)
        assert (answer.text, answer.finish_reason, answer.cached_tokens) == ("Paris.", "stop", 7)
        assert answer.token_ids == (100, 101, 102)
        record = client.sleep("chat", restore={"kv_cache": "pinned"}, drain={"mode": "abort"})
        assert record["state"] == "succeeded"
        assert client.model("chat")["state"] == "asleep"
        with pytest.raises(Unavailable) as refused:
            client.chat("chat", "Still there?")
        assert (refused.value.code, refused.value.retry_after_s) == ("gate_closed", 5.0)
        assert client.wake(tags=["weights"])["tags"] == ["weights"]
        assert client.wake()["state"] == "succeeded"
        assert [one["kind"] for one in client.operations("chat", limit=2)] == ["wake", "wake"]
        assert client.operation(record["id"])["id"] == record["id"]
        assert [model["name"] for model in client.models()] == ["chat"]


async def test_the_awaited_client_does_the_same(rig: Rig, client: AsyncClient) -> None:
    async with client:
        assert (await client.chat("chat", [{"role": "user", "content": "Hi"}])).text == "Paris."
        begun = await client.sleep(wait=False)
        await rig.coordinator.wait(begun["id"], 5)
        assert (await client.operation(begun["id"]))["state"] == "succeeded"
        assert (await client.model("chat"))["state"] == "asleep"
        assert (await client.wake())["state"] == "succeeded"
        assert len(await client.operations()) == 2
        assert len(await client.models()) == 1


async def test_each_kind_of_refusal_has_its_class(rig: Rig, client: AsyncClient) -> None:
    with pytest.raises(BadRequest, match="Known modes"):
        await client.sleep(restore={"weights": "tape"})
    with pytest.raises(NotFound, match="Known models: chat"):
        await client.sleep("nobody")
    with pytest.raises(Rejected) as stale:
        await client.sleep("chat", generation=999)
    assert stale.value.code == "generation"
    rig.rank().fault("preflight", Fault.REFUSE)
    with pytest.raises(Rejected) as refused:
        await client.sleep()
    assert refused.value.body["operation"]["state"] == "rejected"
    rig.rank().fault("commit", Fault.DIE)
    with pytest.raises(Failed):
        await client.sleep()


async def test_an_idempotency_key_is_sent(client: AsyncClient) -> None:
    first = await client.sleep(idempotency_key="k")
    await client.wake()
    assert (await client.sleep(idempotency_key="k"))["id"] == first["id"]


async def test_an_operation_can_be_cancelled(rig: Rig, client: AsyncClient) -> None:
    rig.rank().gate.running = 1
    begun = await client.sleep(wait=False)
    await asyncio.sleep(0.1)
    assert (await client.cancel(begun["id"]))["code"] == "cancelled"


def test_nobody_there_is_told_with_what_to_do() -> None:
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(ConnectionFailed, match="is `torpor serve` running"),
    ):
        client.models()


def test_an_answer_that_is_no_problem_document_is_an_error_still(tmp_path: Path) -> None:
    """Such as that of a proxy in between."""
    transport = httpx.MockTransport(lambda request: httpx.Response(502, text="<html>bad gateway</html>"))
    with Client(HERE, transport=transport) as client, pytest.raises(ProblemError) as caught:
        client.models()
    assert (caught.value.status, caught.value.code) == (502, "unknown")


@pytest.mark.parametrize(
    "name", ["chat?", "chat#", "../models/chat", "..", ".", "a/b", "%63hat", "chat ", "\u00e9"]
)
async def test_a_strange_name_never_means_another_model(rig: Rig, client: AsyncClient, name: str) -> None:
    with pytest.raises(NotFound) as unknown:
        await client.sleep(name)
    assert unknown.value.code in ("unknown_model", "no_such_path")
    with pytest.raises(NotFound):
        await client.delete(name)
    with pytest.raises(NotFound):
        await client.model(name)
    assert (await client.model("chat"))["state"] == "awake"


@pytest.mark.parametrize(
    "answer", [httpx.Response(200, text="<html>"), httpx.Response(200, json=[]), httpx.Response(307, json={})]
)
def test_what_is_no_answer_of_the_service_is_told_as_that(answer: httpx.Response) -> None:
    with (
        Client(HERE, transport=httpx.MockTransport(lambda request: answer)) as client,
        pytest.raises(ConnectionFailed, match="is not torpor"),
    ):
        client.models()


@pytest.mark.parametrize(
    ("detail", "line"),
    [
        ("no tag 'x'; 'chat' has weights", "no tag 'x'; 'chat' has weights. Name a known one."),
        ("`tags` is empty.", "`tags` is empty. Name a known one."),
    ],
)
def test_an_error_in_one_line_keeps_detail_and_hint_apart(detail: str, line: str) -> None:
    body = {"code": "refused", "detail": detail, "hint": "Name a known one."}
    answer = httpx.Response(409, json=body)
    with (
        Client(HERE, transport=httpx.MockTransport(lambda request: answer)) as client,
        pytest.raises(Rejected) as refused,
    ):
        client.models()
    assert str(refused.value) == line
    assert openai_error(Problem(409, "refused", detail, hint="Name a known one."))["message"] == line


def test_both_clients_have_the_same_calls() -> None:
    def calls(kind: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: list(inspect.signature(one).parameters) for name, one in methods if not name.startswith("_")
        }

    blocking = calls(Client)
    del blocking["from_ray"]  # not over HTTP: its handles are for a blocking caller, a trainer
    assert blocking == calls(AsyncClient)
