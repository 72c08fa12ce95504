"""Holds at the front door (G6): who may end them, leases, and a block of Python that holds a model asleep."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_process import ServiceProcess, running
from service_rig import Rig

from torpor.service import AsyncClient, Client, Rejected

HERE = "http://torpor.test"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running(tmp_path_factory.mktemp("holds")) as process:
        yield process


def until(true_of: Callable[[dict[str, Any]], bool], client: Client, timeout_s: float = 15) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while not true_of(model := client.model("chat")):
        assert time.monotonic() < deadline, f"still {model}"
        time.sleep(0.05)
    return model


async def test_a_models_holds_say_who_and_until_when(rig: Rig) -> None:
    asked = {"lease_s": 30, "on_expiry": "wake"}
    slept = await rig.http.post("/sleep", json=asked, headers={"User-Agent": "trainer/7\t(gpu \x7f box)"})
    model = (await rig.http.get("/models/chat")).json()
    assert model["hold"] is True
    (hold,) = model["holds"]
    assert (hold["operation"], hold["lease_s"], hold["on_expiry"]) == (slept.json()["id"], 30, "wake")
    assert hold["by"].startswith("local at ") and hold["by"].endswith("trainer/7(gpu  box)")
    assert hold["expires_at"] == pytest.approx(hold["since"] + 30, abs=1)
    renewed = (await rig.http.post(f"/operations/{slept.json()['id']}/renew")).json()
    assert renewed["model"] == "chat" and renewed["expires_at"] > hold["expires_at"]
    await rig.http.post("/wake")
    model = (await rig.http.get("/models/chat")).json()
    assert (model["hold"], model["holds"]) == (False, [])
    late = await rig.http.post(f"/operations/{slept.json()['id']}/renew")
    assert (late.status_code, late.json()["code"]) == (409, "no_lease")
    assert (await rig.http.post("/operations/op-none/renew")).status_code == 404


async def test_a_sleep_that_was_opted_in_to_wake_on_request_is_no_hold(rig: Rig) -> None:
    await rig.http.post("/sleep", json={"wake_on_request": True})
    model = (await rig.http.get("/models/chat")).json()
    assert (model["state"], model["hold"]) == ("asleep", False)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"wake_on_request": True, "lease_s": 5}, "leave one out"),
        ({"on_expiry": "wake"}, "give lease_s"),
        ({"lease_s": 0.1}, "lease_s"),
        ({"lease_s": 5, "on_expiry": "explode"}, "on_expiry"),
    ],
)
async def test_terms_of_a_hold_that_make_no_sense_are_refused_by_name(
    rig: Rig, body: dict[str, Any], says: str
) -> None:
    answer = await rig.http.post("/sleep", json=body)
    assert answer.status_code == 422
    assert says in answer.json()["detail"], answer.text
    assert (await rig.http.get("/models/chat")).json()["state"] == "awake"


def test_a_block_of_python_holds_a_model_asleep_longer_than_its_lease(service: ServiceProcess) -> None:
    with Client(service.url) as client:
        with client.asleep("chat", restore={"kv_cache": "pinned"}, lease_s=1, on_expiry="wake") as freed:
            assert freed.bytes == {"memory:0": 150 << 20}
            assert "process" in client.model("chat")["holds"][0]["by"]
            time.sleep(2.5)
            assert client.model("chat")["hold"] and not freed.lost
        assert client.model("chat")["state"] == "awake"
        assert not [one.name for one in threading.enumerate() if one.name == "torpor-lease"]


def test_an_error_in_the_block_wakes_the_model_too(service: ServiceProcess) -> None:
    with Client(service.url) as client:
        with pytest.raises(ZeroDivisionError), client.asleep("chat"):
            raise ZeroDivisionError
        assert client.model("chat")["state"] == "awake"


async def test_the_awaited_client_holds_alike_and_sees_a_hold_that_was_ended(rig: Rig) -> None:
    async with AsyncClient(HERE, transport=httpx.ASGITransport(rig.app)) as client:
        async with client.asleep(tags=["kv_cache"], lease_s=1) as freed:
            await asyncio.sleep(1.5)
            assert (await client.model("chat"))["hold"] and not freed.lost
            await client.wake()
            await asyncio.sleep(0.5)
            assert "sleep anew" in freed.lost
        assert (await client.model("chat"))["state"] == "awake"
        with pytest.raises(Rejected):
            await client.renew(freed.operation["id"])


async def test_who_leaves_ends_his_own_hold_and_the_last_one_wakes_the_model(rig: Rig) -> None:
    """G6: two blocks of Python that overlap, and a person who wakes for all."""
    async with AsyncClient(HERE, transport=httpx.ASGITransport(rig.app)) as client:
        async with client.asleep("chat") as first:
            second = await client.sleep("chat", lease_s=30)
            assert {hold["operation"] for hold in (await client.model("chat"))["holds"]} == {
                first.operation["id"],
                second["id"],
            }
        left = await client.model("chat")
        assert (left["state"], [hold["operation"] for hold in left["holds"]]) == ("asleep", [second["id"]])
        assert (await client.wake("chat", releases=second["id"]))["state"] == "succeeded"
        assert (await client.model("chat"))["state"] == "awake"
        async with client.asleep("chat"):
            await client.sleep("chat", lease_s=30)
            await client.wake("chat")
            assert (await client.model("chat"))["holds"] == []
            own = await client.sleep("chat", lease_s=30)
        assert [hold["operation"] for hold in (await client.model("chat"))["holds"]] == [own["id"]], (
            "another's, which began after this one had been ended"
        )


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"releases": ""}, 422, "releases"),
        ({"releases": 7}, 422, "releases"),
        ({"releases": "op-none"}, 409, "name the operation of the sleep whose hold is to end"),
        ({"releases": "op-none", "tags": ["weights"]}, 422, "leave tags out"),
    ],
)
async def test_a_hold_that_there_is_not_is_refused_by_name_and_nothing_wakes(
    rig: Rig, body: dict[str, Any], status: int, says: str
) -> None:
    await rig.http.post("/sleep")
    answer = await rig.http.post("/wake", json=body)
    assert (answer.status_code, says in answer.json()["detail"]) == (status, True), answer.text
    model = (await rig.http.get("/models/chat")).json()
    assert (model["state"], model["hold"]) == ("asleep", True)


HOLDER = """
import sys, time
from torpor.service import Client
with Client(sys.argv[1]).asleep("chat", lease_s=1, on_expiry=sys.argv[2]):
    print("asleep", flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("on_expiry", ["keep", "wake"])
def test_a_killed_holder_leaves_the_model_as_was_asked_for(
    service: ServiceProcess, on_expiry: str, tmp_path: Path
) -> None:
    """A real SIGKILL: nothing of the block's end is carried out."""
    arguments = [sys.executable, "-c", HOLDER, service.url, on_expiry]
    with Client(service.url) as client, subprocess.Popen(arguments, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"asleep\n"
        time.sleep(1.5)
        assert client.model("chat")["holds"][0]["expires_at"] is not None, "renewed beyond its length"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        if on_expiry == "wake":
            until(lambda model: model["state"] == "awake" and not model["hold"], client)
        else:
            until(lambda model: model["hold"] and model["holds"][0]["expires_at"] is None, client)
            assert client.model("chat")["state"] == "asleep"
            client.wake()
