"""POST /sleep and /wake, and what is said of operations and models."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from service_rig import Rig

from torpor.actors.coordinator.memory import Fault

MIB = 1 << 20


async def test_sleep_answers_with_the_finished_operation_and_every_rank_s_bytes(wide_rig: Rig) -> None:
    """C6: outcome, bytes and phases."""
    answer = await wide_rig.http.post("/models/chat/sleep", json={"restore": {"kv_cache": "cpu"}})
    assert answer.status_code == 200, answer.text
    record = answer.json()
    assert (record["kind"], record["model"], record["state"]) == ("sleep", "chat", "succeeded")
    assert [rank["freed_bytes"] for rank in record["ranks"]] == [150 * MIB] * 3
    assert {rank["outcome"] for rank in record["ranks"]} == {"committed"}
    assert [phase["name"] for phase in record["phases"]] == [
        "preflight",
        "drain",
        "stage",
        "commit",
        "publish",
    ]
    assert record["finished_at"] >= record["created_at"]


async def test_a_sleeping_model_is_shown_with_its_parked_tags_and_memory_by_tag(rig: Rig) -> None:
    await rig.http.post("/sleep")
    (model,) = (await rig.http.get("/models")).json()["models"]
    assert (model["state"], model["parked_tags"]) == ("asleep", ["kv_cache", "weights"])
    assert model["gate"] == {"open": False, "reason": "asleep"}
    (rank,) = model["ranks"]
    assert {row["tag"]: row["device_bytes"] for row in rank["memory"]} == {"kv_cache": 0, "weights": 0}
    assert rank["device"]["free_bytes"] == rank["device"]["total_bytes"]


async def test_wake_brings_the_model_back_and_raises_its_generation(rig: Rig) -> None:
    before = (await rig.http.get("/models/chat")).json()["generation"]
    await rig.http.post("/sleep", json={})
    answer = await rig.http.post("/wake", json={"tags": ["weights", "kv_cache"]})
    assert answer.json()["state"] == "succeeded"
    after = await rig.http.get("/models/chat")
    assert (after.json()["state"], after.json()["gate"]["open"]) == ("awake", True)
    assert after.json()["generation"] > before
    assert after.headers["ETag"] == f'"{after.json()["generation"]}"'


async def test_sleeping_and_waking_twice_succeeds(rig: Rig) -> None:
    """C1."""
    for path in ("/sleep", "/sleep", "/wake", "/wake"):
        assert (await rig.http.post(path, json={})).status_code == 200
    assert (await rig.http.get("/models/chat")).json()["state"] == "awake"


async def test_a_model_that_only_the_query_names_is_the_one_that_sleeps_and_wakes(wide_rig: Rig) -> None:
    for path, state in (("/sleep?model=draft", "asleep"), ("/wake?id=draft", "awake")):
        assert (await wide_rig.http.post(path)).json()["model"] == "draft"
        assert (await wide_rig.http.get("/models/draft")).json()["state"] == state


async def test_a_star_fans_out_to_one_operation_a_model(wide_rig: Rig) -> None:
    answer = await wide_rig.http.post("/sleep", json={"model": "*"})
    assert answer.status_code == 200, answer.text
    assert {one["model"] for one in answer.json()["operations"]} == {"chat", "draft"}
    answer = await wide_rig.http.post("/wake", json={"models": ["draft"]})
    assert [one["model"] for one in answer.json()["operations"]] == ["draft"]
    states = {one["name"]: one["state"] for one in (await wide_rig.http.get("/models")).json()["models"]}
    assert states == {"chat": "asleep", "draft": "awake"}


async def test_a_fan_out_that_fails_in_part_tells_every_end(wide_rig: Rig) -> None:
    wide_rig.rank("chat", 2).fault("preflight", Fault.REFUSE)
    answer = await wide_rig.http.post("/sleep", json={"models": "*"})
    assert answer.status_code == 409
    ends = {one["model"]: one["state"] for one in answer.json()["operations"]}
    assert ends == {"chat": "rejected", "draft": "succeeded"}


async def test_a_fan_out_with_one_unknown_name_begins_nothing(wide_rig: Rig) -> None:
    answer = await wide_rig.http.post("/sleep", json={"models": ["chat", "nobody"]})
    assert answer.status_code == 404
    assert (await wide_rig.http.get("/operations")).json()["operations"] == []


async def test_respond_async_answers_at_once_with_where_to_look(rig: Rig) -> None:
    stage = rig.rank().hold("stage")
    answer = await rig.http.post("/sleep", json={}, headers={"Prefer": "respond-async"})
    stage.let_go()
    assert answer.status_code == 202
    assert answer.json()["state"] == "running"
    where = answer.headers["Location"]
    assert where == f"/operations/{answer.json()['id']}"
    await rig.coordinator.wait(answer.json()["id"], 5)
    assert (await rig.http.get(where)).json()["state"] == "succeeded"


async def test_a_dry_run_plans_and_changes_nothing(rig: Rig) -> None:
    """C8."""
    answer = await rig.http.post("/sleep", json={"dry_run": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["dry_run"] is True
    assert answer.json()["ranks"][0]["freed_bytes"] == 150 * MIB
    model = (await rig.http.get("/models/chat")).json()
    assert (model["state"], model["ranks"][0]["memory"][1]["device_bytes"]) == ("awake", 100 * MIB)


async def test_a_second_operation_is_refused_or_waits_as_asked(rig: Rig) -> None:
    """C4: native default reject, an empty body waits, on_conflict decides."""
    stage = rig.rank().hold("stage")
    first = asyncio.create_task(rig.http.post("/sleep", json={}))
    await stage.reached()
    refused = await rig.http.post("/wake", json={})
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    running = (await rig.http.get("/models/chat")).json()["operation"]
    assert running in refused.json()["detail"]
    asyncio.get_running_loop().call_later(0.1, stage.let_go)
    waited = await rig.http.post("/wake")
    assert waited.status_code == 200, waited.text
    assert (await first).status_code == 200
    assert (await rig.http.get("/models/chat")).json()["state"] == "awake"


async def test_the_same_idempotency_key_gives_the_same_operation(rig: Rig) -> None:
    """C5: also after its end; another body under the key is refused."""
    headers = {"Idempotency-Key": "nightly-1"}
    first = await rig.http.post("/sleep", json={}, headers=headers)
    await rig.http.post("/wake", json={})
    again = await rig.http.post("/sleep", json={}, headers=headers)
    assert again.json()["id"] == first.json()["id"]
    assert (await rig.http.get("/models/chat")).json()["state"] == "awake"
    other = await rig.http.post("/sleep", json={"tags": ["weights"]}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
    assert "new Idempotency-Key" in other.json()["hint"]


async def test_if_match_refuses_a_model_that_has_changed_since(rig: Rig) -> None:
    etag = (await rig.http.get("/models/chat")).headers["ETag"]
    assert (await rig.http.post("/sleep", json={}, headers={"If-Match": etag})).status_code == 200
    stale = await rig.http.post("/wake", json={}, headers={"If-Match": etag})
    assert (stale.status_code, stale.json()["code"]) == (412, "generation")
    assert (await rig.http.get("/models/chat")).json()["state"] == "asleep"
    now = f'"{stale.json()["generation"]}"'
    assert (await rig.http.post("/wake", json={}, headers={"If-Match": now})).status_code == 200


@pytest.mark.parametrize("header", ["abc", "", '"4", "5"', "٣", "9" * 40])
async def test_an_if_match_that_names_no_generation_is_told_so(rig: Rig, header: str) -> None:
    answer = await rig.http.post("/sleep", json={}, headers={"If-Match": header.encode()})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_field")
    assert "names no generation" in answer.json()["detail"]


async def test_of_two_that_looked_at_the_same_generation_one_is_refused_also_when_both_come_at_once(
    rig: Rig,
) -> None:
    """C4: compared where nothing can come between, not only where the request came in."""
    etag = (await rig.http.get("/models/chat")).headers["ETag"]
    bodies = [{"tags": ["weights"], "on_conflict": "wait"}, {"tags": ["kv_cache"], "on_conflict": "wait"}]
    answers = await asyncio.gather(
        *(rig.http.post("/sleep", json=body, headers={"If-Match": etag}) for body in bodies)
    )
    assert sorted(answer.status_code for answer in answers) == [200, 412]
    refused = next(answer.json() for answer in answers if answer.status_code == 412)
    assert refused["code"] == "generation"
    assert len((await rig.http.get("/models/chat")).json()["parked_tags"]) == 1


async def test_a_key_that_comes_again_with_its_generation_gets_what_was_done(rig: Rig) -> None:
    """C5: the model has changed since, by that very operation."""
    etag = (await rig.http.get("/models/chat")).headers["ETag"]
    headers = {"If-Match": etag, "Idempotency-Key": "once"}
    first = await rig.http.post("/sleep", json={}, headers=headers)
    again = await rig.http.post("/sleep", json={}, headers=headers)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    other = await rig.http.post("/wake", json={}, headers=headers | {"Idempotency-Key": "twice"})
    assert (other.status_code, other.json()["code"]) == (412, "generation")


async def test_a_caller_that_goes_away_changes_nothing_about_its_operation(rig: Rig) -> None:
    """C7."""
    stage = rig.rank().hold("stage")
    caller = asyncio.create_task(rig.http.post("/sleep", json={}))
    await stage.reached()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    stage.let_go()
    (record,) = (await rig.http.get("/operations")).json()["operations"]
    assert (await rig.coordinator.wait(record["id"], 5)).state == "succeeded"
    assert (await rig.http.get("/models/chat")).json()["state"] == "asleep"


async def test_an_operation_can_be_cancelled_until_it_is_decided(rig: Rig) -> None:
    rig.rank().gate.running = 1
    begun = await rig.http.post("/sleep", json={}, headers={"Prefer": "respond-async"})
    where = begun.headers["Location"]
    await asyncio.sleep(0.1)
    cancelled = await rig.http.post(f"{where}/cancel")
    assert cancelled.status_code == 200, cancelled.text
    assert (cancelled.json()["state"], cancelled.json()["code"]) == ("rejected", "cancelled")
    assert (await rig.http.get("/models/chat")).json()["gate"]["open"]
    late = await rig.http.post(f"{where}/cancel")
    assert (late.status_code, late.json()["code"]) == (409, "operation_finished")


async def test_operations_are_listed_newest_first_and_by_model(wide_rig: Rig) -> None:
    await wide_rig.http.post("/models/chat/sleep", json={})
    await wide_rig.http.post("/models/draft/sleep", json={})
    listed = (await wide_rig.http.get("/operations")).json()["operations"]
    assert [one["model"] for one in listed] == ["draft", "chat"]
    chosen = (await wide_rig.http.get("/operations", params={"model": "chat", "limit": 5})).json()[
        "operations"
    ]
    assert [one["model"] for one in chosen] == ["chat"]


@pytest.mark.parametrize("path", ["/release_memory", "/resume_memory"])
async def test_the_memory_calls_take_no_body_an_empty_one_or_tags(rig: Rig, path: str) -> None:
    bodies = (
        None,
        {},
        {"tags": ["weights"], "model": "chat"},
        {"tags": ["cuda_graph"]},
        {"tags": ["kv_cache"], "extra": 1},
    )
    for body in bodies:
        answer = await rig.http.post(path, json=body) if body is not None else await rig.http.post(path)
        assert answer.status_code == 200, answer.text
    assert answer.headers["Torpor-Ignored"] == "extra"


async def test_the_memory_status_lists_parked_tags(rig: Rig) -> None:
    await rig.http.post("/release_memory", json={"tags": ["weights"]})
    status = (await rig.http.get("/memory_status")).json()
    assert (status["state"], status["parked_tags"]) == ("asleep", ["weights"])
    await rig.http.post("/resume_memory")
    assert (await rig.http.get("/memory_status")).json()["parked_tags"] == []


async def test_the_memory_calls_wait_for_a_running_operation(rig: Rig) -> None:
    stage = rig.rank().hold("stage")
    first = asyncio.create_task(rig.http.post("/release_memory"))
    await stage.reached()
    asyncio.get_running_loop().call_later(0.1, stage.let_go)
    second: httpx.Response = await rig.http.post("/resume_memory")
    assert second.status_code == 200, second.text
    assert (await first).json()["finished_at"] <= second.json()["finished_at"]


async def test_an_explicit_wake_makes_room_when_asked_to(wide_rig: Rig) -> None:
    """The idle neighbour on its device gives way; without the wish the answer is 507."""
    await wide_rig.http.post("/models/draft/sleep")
    device = wide_rig.cluster.devices[0]
    device.take("another process", device.free_bytes)
    wide_rig.rank("chat").gate.quiet_since_s = asyncio.get_running_loop().time()  # it has just served
    assert (await wide_rig.http.post("/models/draft/wake")).status_code == 507
    answer = await wide_rig.http.post("/models/draft/wake", json={"make_room": "idle"})
    assert answer.status_code == 200, answer.text
    (chat, draft) = (await wide_rig.http.get("/models")).json()["models"]
    assert (chat["state"], chat["hold"], draft["state"]) == ("asleep", False, "awake")
    (sleep,) = (await wide_rig.http.get("/operations?model=chat")).json()["operations"]
    assert sleep["origin"] == "room"
