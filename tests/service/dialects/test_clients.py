"""Rounds of calls as real clients make them: once, each call twice, and each cut off half-way and sent again."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from client_calls import BOTH, CLIENTS, Step
from service_rig import Rig

MODES = ("plain", "repeated", "cut")


async def send(rig: Rig, step: Step) -> httpx.Response:
    rig.rank().gate.running = step.busy
    return await rig.http.request(step.method, step.path, params=step.query, json=step.json)


async def check(rig: Rig, step: Step, answer: httpx.Response) -> None:
    assert answer.status_code == step.status, f"{step.path}: {answer.text}"
    if step.reads_json:
        answer.json()
    if step.body:
        said = answer.json()
        assert {name: said.get(name) for name in step.body} == dict(step.body), step.path
    rank = rig.rank()
    parked = sum(rank.ledger.sizes[tag] for tag in step.parked)
    total = sum(rank.ledger.sizes.values())
    assert rig.cluster.devices[0].used[rank.ledger.owner] == total - parked, f"{step.path}: memory"
    model = (await rig.http.get("/models/chat")).json()
    assert tuple(model["parked_tags"]) == tuple(sorted(step.parked)), step.path
    assert model["gate"]["reason"] == step.gate, step.path


async def operations(rig: Rig) -> int:
    return len((await rig.http.get("/operations", params={"limit": 1000})).json()["operations"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_s_round_of_calls_ends_as_it_expects(rig: Rig, client: str, mode: str) -> None:
    """F10, F20, C1, C7. In plain, two rounds: a trainer comes back."""
    for step in CLIENTS[client] * (2 if mode == "plain" else 1):
        if mode == "cut" and step.method == "POST":
            await cut_off(rig, step)
        await check(rig, step, await send(rig, step))
        if mode == "repeated":
            await check(rig, step, await send(rig, step))
    model = (await rig.http.get("/models/chat")).json()
    assert (model["state"], model["gate"]["open"], model["hold"]) == ("awake", True, False)


async def test_a_call_that_was_cut_between_its_two_operations_does_both(rig: Rig) -> None:
    """C7: a full wake_up of vLLM's wakes, then ends the pause."""
    await rig.http.post("/sleep", params={"level": 0})
    await rig.http.post("/sleep", params={"level": 1})
    await cut_off(rig, Step("POST", "/wake_up"))
    for _ in range(100):
        model = (await rig.http.get("/models/chat")).json()
        if model["gate"]["open"]:
            break
        await asyncio.sleep(0.02)
    assert (model["state"], model["gate"]["open"], model["paused"]) == ("awake", True, False)


async def cut_off(rig: Rig, step: Step) -> None:
    """The caller goes away while the ranks work at it."""
    stage = rig.rank().hold("stage")
    call = asyncio.create_task(send(rig, step))
    reached = asyncio.create_task(stage.reached())
    await asyncio.wait({call, reached}, return_when=asyncio.FIRST_COMPLETED)  # not every call moves memory
    for task in (call, reached):
        task.cancel()
    await asyncio.gather(call, reached, return_exceptions=True)
    asyncio.get_running_loop().call_later(0.03, stage.let_go)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/release_memory_occupation", {"tags": list(BOTH)}), ("/sleep", {"level": 1}), ("/sleep", None)],
)
async def test_a_client_that_gives_up_twice_and_asks_a_third_time_has_asked_for_one_operation(
    rig: Rig, path: str, body: dict[str, object] | None
) -> None:
    """F10: a time-out shorter than the sleep, and three attempts."""
    stage = rig.rank().hold("stage")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rig.http.post(path, json=body), 0.05)
    asyncio.get_running_loop().call_later(0.1, stage.let_go)
    assert (await rig.http.post(path, json=body)).status_code == 200
    (only,) = (await rig.http.get("/operations")).json()["operations"]
    assert (only["state"], rig.rank().calls.count("commit")) == ("succeeded", 1)
