"""Weight updates over HTTP and by the client: the version that they bring, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from service_rig import Rig

from torpor.actors.coordinator import Fault
from torpor.actors.messages import Kind
from torpor.service import AsyncClient, Client, Rejected
from torpor.service.settings.load import SettingsError, load_settings
from torpor.service.settings.shape import cluster_config


@pytest.fixture
def client(rig: Rig) -> AsyncClient:
    return AsyncClient("http://torpor.test", transport=httpx.ASGITransport(rig.app))


async def test_an_update_answers_with_the_version_that_it_has_brought(rig: Rig, client: AsyncClient) -> None:
    """C10: returned, and readable."""
    answer = await rig.http.post("/models/chat/update_weights", json={"path": "/weights/new"})
    assert answer.status_code == 200, answer.text
    record = answer.json()
    assert (record["kind"], record["state"], record["tags"]) == ("update", "succeeded", ["weights"])
    assert record["weights_version"] == 1
    assert [phase["name"] for phase in record["phases"]] == [
        "preflight",
        "drain",
        "stage",
        "commit",
        "publish",
    ]
    again = await client.update_weights("chat", "/weights/newer", drain={"mode": "abort"})
    assert again["weights_version"] == 2
    assert (await client.model("chat"))["weights_version"] == 2
    assert rig.rank().ledger.weights_version == 2
    asked = await client.update_weights("chat", "/weights/newest", dry_run=True)
    assert (asked["state"], asked["weights_version"]) == ("succeeded", None)
    assert (await client.model("chat"))["weights_version"] == 2


async def test_an_idempotency_key_updates_once(rig: Rig, client: AsyncClient) -> None:
    """C5."""
    first = await client.update_weights("chat", "/weights/new", idempotency_key="k")
    assert (await client.update_weights("chat", "/weights/new", idempotency_key="k"))["id"] == first["id"]
    assert rig.rank().ledger.weights_version == 1
    other = await rig.http.post(
        "/models/chat/update_weights", json={"path": "/other"}, headers={"Idempotency-Key": "k"}
    )
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")


@pytest.mark.parametrize(
    ("model", "body", "status", "code"),
    [
        ("nobody", {"path": "/w"}, 404, "unknown_model"),
        ("chat", {}, 422, "invalid_field"),
        ("chat", {"path": ""}, 422, "invalid_field"),
        ("chat", {"path": 3}, 422, "invalid_field"),
        ("chat", {"path": "/w", "paht": "/w"}, 422, "unknown_field"),
        ("chat", {"path": "/w", "drain": {"mode": "hurry"}}, 422, "unknown_mode"),
    ],
)
async def test_an_update_that_cannot_be_read_says_why(
    rig: Rig, model: str, body: dict[str, object], status: int, code: str
) -> None:
    answer = await rig.http.post(f"/models/{model}/update_weights", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert "preflight" not in rig.rank().calls


async def test_a_refused_update_names_the_rank_and_one_of_sleeping_weights_the_way_out(
    rig: Rig, client: AsyncClient
) -> None:
    rig.rank().fault("stage", Fault.REFUSE)
    with pytest.raises(Rejected, match="rank 0 refuses"):
        await client.update_weights("chat", "/w")
    await client.sleep("chat")
    with pytest.raises(Rejected, match="wake them first") as refused:
        await client.update_weights("chat", "/w")
    assert refused.value.code == "wrong_state"
    await client.wake("chat", tags=["weights"])
    assert (await client.update_weights("chat", "/w"))["state"] == "succeeded"
    assert (await client.model("chat"))["parked_tags"] == ["kv_cache"]


def test_the_blocking_client_asks_alike() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"kind": Kind.UPDATE, "weights_version": 4})

    with Client("http://torpor.test", transport=httpx.MockTransport(answer)) as client:
        assert client.update_weights("chat", "/w", on_conflict="wait")["weights_version"] == 4
    assert (seen[0].method, seen[0].url.path) == ("POST", "/models/chat/update_weights")
    assert seen[0].content == b'{"path":"/w","on_conflict":"wait"}'


def test_weights_roots_are_absolute_folders(tmp_path: Path) -> None:
    file = tmp_path / "torpor.yaml"
    file.write_text("models: [{name: a}]\nweights_roots: [/weights, ~/mine]\n")
    roots = cluster_config(load_settings(file, {})).weights_roots
    assert roots == ("/weights", str(Path("~/mine").expanduser()))
    file.write_text("models: [{name: a}]\nweights_roots: [weights]\n")
    with pytest.raises(SettingsError, match="'weights' is not an absolute path"):
        load_settings(file, {})
