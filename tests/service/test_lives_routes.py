"""Recover and delete over HTTP, by the client and in the problems that they answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from service_rig import Rig, make_rig

from torpor.actors.coordinator.memory import Held
from torpor.service import AsyncClient, NotFound, Rejected


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Two models whose ranks can be made and ended."""
    async with make_rig(tmp_path, {"chat": 2, "draft": 1}, making=True) as made:
        yield made


@pytest.fixture
def client(rig: Rig) -> AsyncClient:
    return AsyncClient("http://torpor.test", transport=httpx.ASGITransport(rig.app))


async def fail(rig: Rig) -> None:
    rig.rank().die()
    await rig.coordinator.fail("chat", "rank 0 is gone")


async def test_recover_answers_with_the_finished_operation_and_the_model_serves(
    rig: Rig, client: AsyncClient
) -> None:
    """M6."""
    await fail(rig)
    answer = await rig.http.post("/models/chat/recover")
    assert answer.status_code == 200, answer.text
    record = answer.json()
    assert (record["kind"], record["state"], record["lost_bytes"]) == ("recover", "succeeded", {})
    assert [phase["name"] for phase in record["phases"]] == ["end", "load"]
    model = (await rig.http.get("/models/chat")).json()
    assert (model["state"], model["gate"]["open"]) == ("awake", True)
    await fail(rig)
    assert (await client.recover("chat", to="asleep"))["state"] == "succeeded"
    assert (await client.model("chat"))["state"] == "asleep"
    assert (await client.wake("chat"))["state"] == "succeeded"


async def test_a_failed_model_tells_how_to_get_it_back(rig: Rig) -> None:
    await fail(rig)
    refused = await rig.http.post("/models/chat/sleep", json={})
    assert (refused.status_code, refused.json()["code"]) == (409, "wrong_state")
    assert "rank 0 is gone" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/models/nobody/recover", {}, 404, "unknown_model"),
        ("/models/chat/recover", {"to": "loading"}, 422, "invalid_field"),
        ("/models/chat/recover", {"too": "awake"}, 422, "unknown_field"),
        ("/models/chat/recover", {"to": "asleep"}, 409, "wrong_state"),
    ],
)
async def test_a_recover_that_cannot_be_says_why_and_changes_nothing(
    rig: Rig, path: str, body: dict[str, str], status: int, code: str
) -> None:
    answer = await rig.http.post(path, json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert (await rig.http.get("/models/chat")).json()["state"] == "awake"


async def test_a_last_drain_names_the_modes_that_it_has(rig: Rig) -> None:
    body = (await rig.http.request("DELETE", "/models/chat", json={"drain": {"mode": "melt"}})).json()
    assert body["known_modes"] == ["finish", "abort", "if_idle"]
    body = (await rig.http.request("DELETE", "/models/chat", json={"drain": {"freeze_timeout_s": 1}})).json()
    assert body["known_fields"] == ["mode", "timeout_s"]


async def test_stale_weights_are_to_be_accepted_by_name(rig: Rig, client: AsyncClient) -> None:
    runtime = rig.coordinator._models["chat"]
    runtime.published = runtime.published.changed(weights_version=2)
    await fail(rig)
    with pytest.raises(Rejected, match="accept_stale_weights") as refused:
        await client.recover("chat")
    assert refused.value.code == "stale_weights"
    assert (await client.recover("chat", accept_stale_weights=True))["state"] == "succeeded"


async def test_delete_ends_a_model_and_nothing_of_it_is_listed(rig: Rig, client: AsyncClient) -> None:
    free = rig.cluster.devices[1].free_bytes
    etag = (await rig.http.get("/models/chat")).headers["ETag"]
    stale = await rig.http.request("DELETE", "/models/chat", headers={"If-Match": '"99"'})
    assert (stale.status_code, stale.json()["code"]) == (412, "generation")
    answer = await rig.http.request(
        "DELETE", "/models/chat", json={"drain": {"mode": "abort"}}, headers={"If-Match": etag}
    )
    assert answer.status_code == 200, answer.text
    assert (answer.json()["kind"], answer.json()["state"]) == ("delete", "succeeded")
    assert rig.cluster.devices[1].free_bytes == free + (150 << 20)
    assert [one["name"] for one in (await rig.http.get("/models")).json()["models"]] == ["draft"]
    assert (await rig.http.get("/models/chat")).status_code == 404
    assert (await rig.http.get(f"/operations/{answer.json()['id']}")).json()["state"] == "succeeded"
    with pytest.raises(NotFound):
        await client.delete("chat")
    assert (await client.delete("draft"))["state"] == "succeeded"
    assert await client.models() == []


async def test_sleep_and_wake_wait_out_a_recovery_when_asked_to(rig: Rig) -> None:
    """C1."""
    await fail(rig)
    assert rig.coordinator._lives is not None
    loading = rig.coordinator._lives._maker.held["load"] = Held()  # type: ignore[attr-defined]
    recovery = asyncio.create_task(rig.http.post("/models/chat/recover"))
    await loading.reached()
    refused = await rig.http.post("/models/chat/sleep", json={})
    assert (refused.status_code, refused.json()["code"]) == (409, "wrong_state")
    asyncio.get_running_loop().call_later(0.1, loading.let_go)
    waited = await rig.http.post("/models/chat/sleep", json={"on_conflict": "wait"})
    assert waited.status_code == 200, waited.text
    assert (await recovery).json()["state"] == "succeeded"


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/release_memory"])
async def test_without_any_model_it_is_said_how_to_make_one(tmp_path: Path, path: str) -> None:
    async with make_rig(tmp_path, {}, making=True) as rig:
        answer = await rig.http.post(path)
    assert (answer.status_code, answer.json()["code"]) == (400, "model_required")
    assert answer.json()["detail"] == "There is no model."
    assert "torpor apply" in answer.json()["hint"]


async def test_a_mount_without_a_name_is_no_path(rig: Rig) -> None:
    answer = await rig.http.post("/m//sleep")
    assert (answer.status_code, answer.json()["code"]) == (404, "no_such_path")
    assert (await rig.http.get("/models/chat")).json()["state"] == "awake"
