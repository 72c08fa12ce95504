"""What drop-in calls answer besides the state that they reach: mounts, names of models, headers, bodies, probes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from service_rig import Rig, make_rig

from torpor.actors.coordinator.memory import Fault
from torpor.actors.messages import RestoreMode

MIB = 1 << 20
CALLS = [
    ("POST", "/sleep?level=1"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/resume_memory_occupation"),
    ("GET", "/health_generate"),
    ("POST", "/release_memory"),
    ("POST", "/resume_memory"),
    ("GET", "/memory_status"),
    ("POST", "/wakeup"),
    ("POST", "/sleep"),
    ("POST", "/wake"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("GET", "/flush_cache"),
    ("POST", "/flush_cache"),
]


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_a_bare_path_with_several_models_lists_the_urls_to_use(
    wide_rig: Rig, method: str, path: str
) -> None:
    answer = await wide_rig.http.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (400, "model_required")
    bare = path.partition("?")[0]
    assert answer.json()["urls"] == [
        f"http://torpor.test/m/chat{bare}",
        f"http://torpor.test/m/draft{bare}",
    ]
    for url in answer.json()["urls"]:
        assert (await wide_rig.http.request(method, url)).status_code == 200


async def test_every_family_is_mounted_for_one_model(wide_rig: Rig) -> None:
    """A mount is a base URL: also for the native calls, OpenAI's and the probes."""
    http = wide_rig.http
    assert (await http.post("/m/draft/sleep", params={"level": 2})).status_code == 200
    states = {one["name"]: one["state"] for one in (await http.get("/models")).json()["models"]}
    assert states == {"chat": "awake", "draft": "asleep"}
    assert (await http.get("/m/draft/is_sleeping")).json() == {"is_sleeping": True}
    assert (await http.get("/m/chat/is_sleeping")).json() == {"is_sleeping": False}
    assert [one["id"] for one in (await http.get("/m/draft/v1/models")).json()["data"]] == ["draft"]
    assert (await http.get("/m/draft/health")).status_code == 200
    said = await http.post("/m/chat/v1/completions", json={"prompt": "Hello"})
    assert (said.status_code, said.json()["model"]) == (200, "chat")
    other = await http.post("/m/chat/v1/completions", json={"prompt": "Hello", "model": "draft"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "unknown_model")
    assert (await http.post("/m/draft/wake", json={})).status_code == 200
    assert (await http.post("/m/chat/models/chat/sleep", json={})).status_code == 200


async def test_a_mount_that_names_no_model_or_another_than_the_request_is_refused(wide_rig: Rig) -> None:
    unknown = await wide_rig.http.post("/m/nobody/wake_up")
    assert (unknown.status_code, unknown.json()["known_models"]) == (404, ["chat", "draft"])
    listed = await wide_rig.http.get(
        "/m/nobody/v1/models"
    )  # what clients ask to see whether a base URL is right
    assert (listed.status_code, listed.json()["error"]["code"]) == (404, "unknown_model")
    two = await wide_rig.http.post("/m/chat/wake_up", params={"id": "draft"})
    assert (two.status_code, two.json()["code"]) == (422, "invalid_field")
    native = await wide_rig.http.post("/m/chat/sleep", json={"model": "draft"})
    assert native.status_code == 422
    assert (await wide_rig.http.get("/m/nobody/health")).status_code == 503
    assert (await wide_rig.http.get("/operations")).json()["operations"] == []


async def test_a_query_may_name_the_model_and_its_unknown_parameters_are_ignored(wide_rig: Rig) -> None:
    """F21; `id` is how a router in front of several engines names one."""
    slept = await wide_rig.http.post("/sleep", params={"id": "chat", "level": "1", "trace": "7"})
    assert (slept.status_code, slept.content) == (200, b"")
    assert "Torpor-Ignored" not in slept.headers
    operation = (await wide_rig.http.get(f"/operations/{slept.headers['Torpor-Operation']}")).json()
    assert (operation["model"], operation["state"]) == ("chat", "succeeded")
    assert (await wide_rig.http.get("/is_sleeping", params={"model": "chat"})).json()["is_sleeping"]
    assert (await wide_rig.http.post("/wake?verbose=1", json={"model": "chat"})).status_code == 200


async def test_unknown_fields_are_refused_in_the_native_dialect_and_named_elsewhere(rig: Rig) -> None:
    refused = await rig.http.post("/sleep", json={"tags": ["weights"], "why": 1})
    assert (refused.status_code, refused.json()["code"]) == (422, "unknown_field")
    assert "why" in refused.json()["detail"]
    for path, body, ignored in (
        ("/sleep", {"level": 1, "why": 1}, "why"),
        ("/sleep", {"options": {"level": 1, "x": 2}, "why": 1}, "options.x, why"),
        ("/release_memory_occupation", {"tags": None, "why": 1}, "why"),
        ("/resume_memory", {"b": 1, "a": 1}, "a, b"),
    ):
        answer = await rig.http.post(path, json=body)
        assert (answer.status_code, answer.headers["Torpor-Ignored"]) == (200, ignored)


@pytest.mark.parametrize(
    ("call", "modes"),
    [
        ({"params": {"level": 1}}, {"weights": "pinned", "kv_cache": "none"}),
        ({"params": {"level": 2}}, {"weights": "none", "kv_cache": "none"}),
        ({"json": {"level": "2"}}, {"weights": "none", "kv_cache": "none"}),
        ({"json": {"options": {"level": 2}}}, {"weights": "none", "kv_cache": "none"}),
        ({"json": {"options": {}}}, {"weights": "pinned", "kv_cache": "none"}),
        ({"params": {"tags": "kv_cache"}}, {"kv_cache": "none"}),
    ],
)
async def test_a_level_says_what_is_kept(
    rig: Rig, call: dict[str, dict[str, object]], modes: dict[str, str]
) -> None:
    """Whatever the model's own defaults are."""
    rig.rank().ledger.modes.update(weights=RestoreMode.CPU, kv_cache=RestoreMode.CPU)
    assert (await rig.http.post("/sleep", **call)).status_code == 200  # type: ignore[arg-type]
    assert {tag: str(mode) for tag, mode in rig.rank().ledger.parked.items()} == modes
    freed = sum(rig.rank().ledger.sizes[tag] for tag in modes)
    assert rig.cluster.devices[0].free_bytes == (1 << 30) - 150 * MIB + freed


async def test_requests_that_run_are_ended_by_vllm_s_default_and_waited_for_by_mode_wait(rig: Rig) -> None:
    rig.rank().gate.running = 2
    asked = asyncio.create_task(rig.http.post("/sleep", params={"mode": "wait"}))
    await asyncio.sleep(0.1)
    assert not asked.done()
    rig.rank().gate.running = 0
    assert (await asked).status_code == 200
    await rig.http.post("/wake_up")
    rig.rank().gate.running = 2
    assert (await rig.http.post("/sleep", params={"level": 1})).status_code == 200
    (newest, *_) = (await rig.http.get("/operations")).json()["operations"]
    assert newest["aborted_requests"] == 2


async def test_a_full_wake_ends_a_pause_of_level_0_and_one_by_tags_does_not(rig: Rig) -> None:
    """The tag `scheduling` is the pause alone."""
    http = rig.http

    async def state() -> tuple[bool, bool, list[str]]:
        model = (await http.get("/models/chat")).json()
        sleeping = (await http.get("/is_sleeping")).json()["is_sleeping"]
        assert sleeping is bool(model["paused"] or model["parked_tags"])
        return model["paused"], model["gate"]["open"], model["parked_tags"]

    for call, after in (
        ({"params": {"level": 0}}, (True, False, [])),
        ({"params": {"tags": "scheduling"}}, (True, False, [])),
        ({"params": {"tags": ["scheduling", "weights"]}}, (True, False, ["weights"])),
        ({"json": {"options": {"level": 0}}}, (True, False, [])),
    ):
        assert (await http.post("/sleep", **call)).status_code == 200  # type: ignore[arg-type]
        assert await state() == after
        assert (await http.post("/wake_up?tags=weights")).status_code == 200
        assert await state() == (True, False, [])
        assert (await http.post("/wake_up")).status_code == 200
        assert await state() == (False, True, [])
    await http.post("/sleep?level=0")
    await http.post("/sleep?level=1")
    assert (await http.post("/wake_up?tags=scheduling")).status_code == 200
    assert await state() == (False, False, ["kv_cache", "weights"])
    await http.post("/wake_up")
    await http.post("/pause_generation")
    assert (await http.post("/resume_memory_occupation")).status_code == 200
    assert await state() == (True, False, []), "SGLang's pause is ended by its own call only"
    assert (await http.post("/continue_generation", json={})).json()["status"] == "ok"
    assert await state() == (False, True, [])


@pytest.mark.parametrize(
    ("path", "call", "left"),
    [
        ("/pause", {}, 0),
        ("/pause", {"params": {"mode": "keep"}}, 2),
        ("/pause", {"json": {"mode": "abort"}}, 0),
        ("/pause", {"json": {"model": "chat", "options": {"mode": "keep"}}}, 2),
        ("/pause_generation", {"json": {}}, 0),
        ("/pause_generation", {"json": {"mode": "retract"}}, 2),
        ("/pause_generation", {"json": {"mode": "in_place"}}, 2),
        ("/sleep", {"params": {"level": 0, "mode": "keep"}}, 2),
    ],
)
async def test_a_pause_ends_or_keeps_what_runs_as_its_mode_says(
    rig: Rig, path: str, call: dict[str, dict[str, object]], left: int
) -> None:
    """G2, C1: twice."""
    rig.rank().gate.running = 2
    for _ in range(2):
        answer = await rig.http.post(path, **call)  # type: ignore[arg-type]
        assert answer.status_code == 200, answer.text
        assert rig.rank().gate.running == left
        assert (await rig.http.get("/is_paused")).json() == {"is_paused": True}
        assert (await rig.http.get("/health_generate")).status_code == 503
    assert (await rig.http.post("/resume", json=call.get("json"))).status_code == 200
    assert (rig.rank().gate.open, rig.rank().gate.running) == (True, left)


async def test_a_flush_is_done_only_when_nothing_runs_and_harms_nobody(rig: Rig) -> None:
    """F12: the ranks' own part is tests/service/dialects/test_resets.py."""
    rig.rank().gate.running = 1
    for method in ("GET", "POST"):
        busy = await rig.http.request(method, "/flush_cache")
        assert (busy.status_code, busy.json()["code"]) == (400, "not_idle")
    assert (rig.rank().gate.open, rig.rank().ledger.resets) == (True, 0)
    assert (await rig.http.post("/reset_prefix_cache")).status_code == 200
    assert (rig.rank().gate.running, rig.rank().ledger.resets) == (1, 1)
    await rig.http.post("/pause_generation", json={"mode": "retract"})
    assert (await rig.http.get("/flush_cache")).status_code == 200
    assert (rig.rank().gate.running, rig.rank().ledger.resets) == (1, 2)


async def test_a_drop_in_call_waits_for_what_runs_already(rig: Rig) -> None:
    """C4."""
    stage = rig.rank().hold("stage")
    first = asyncio.create_task(rig.http.post("/sleep", json={"tags": ["weights"]}))
    await stage.reached()
    asyncio.get_running_loop().call_later(0.1, stage.let_go)
    assert (await rig.http.post("/wake_up")).status_code == 200
    assert (await first).status_code == 200
    assert (await rig.http.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_a_wake_without_memory_is_told_with_its_bytes_and_nothing_is_lost(rig: Rig) -> None:
    """M4: no dialect hides it."""
    await rig.http.post("/release_memory_occupation")
    device = rig.cluster.devices[0]
    device.take("another process", device.free_bytes)
    refused = await rig.http.post("/resume_memory_occupation", json={})
    assert (refused.status_code, refused.json()["needed_bytes"]) == (507, 150 * MIB)
    device.give("another process", 150 * MIB)
    assert (await rig.http.post("/resume_memory_occupation", json={})).status_code == 200


async def test_health_generate_is_503_while_asleep_and_wakes_nothing(rig: Rig) -> None:
    """G6."""
    assert (await rig.http.get("/health_generate")).status_code == 200
    await rig.http.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
    asleep = await rig.http.get("/health_generate")
    assert (asleep.status_code, asleep.json()["code"]) == (503, "gate_closed")
    assert [one["kind"] for one in (await rig.http.get("/operations")).json()["operations"]] == ["sleep"]
    await rig.http.post("/resume_memory_occupation")
    rig.rank().fault("status", Fault.RAISE)
    assert (await rig.http.get("/health_generate")).status_code == 503
    assert (await rig.http.get("/health_generate")).status_code == 200


async def test_weights_from_disk_say_whether_they_were_written(rig: Rig) -> None:
    done = await rig.http.post("/update_weights_from_disk", json={"model_path": "/w", "flush_cache": True})
    assert (done.status_code, done.json()["success"]) == (200, True)
    assert (await rig.http.get("/models/chat")).json()["weights_version"] == 1
    await rig.http.post("/release_memory_occupation")
    refused = await rig.http.post("/update_weights_from_disk", json={"model_path": "/w"})
    assert (refused.status_code, refused.json()["success"]) == (409, False)
    assert "wake" in refused.json()["message"]
    unnamed = await rig.http.post("/update_weights_from_disk", json={})
    assert (unnamed.status_code, unnamed.json()["success"]) == (422, False)


async def test_the_native_pause_has_its_own_words(rig: Rig) -> None:
    """C1, and a freeze's limit."""
    rig.rank().gate.running = 1
    body = {"drain": {"mode": "freeze", "freeze_timeout_s": 60}}
    for _ in range(2):
        paused = await rig.http.post("/models/chat/pause", json=body)
        assert (paused.status_code, paused.json()["kind"]) == (200, "pause")
    assert (await rig.http.get("/models/chat")).json()["gate"] == {"open": False, "reason": "paused"}
    refused = await rig.http.post("/models/chat/pause", json={"mode": "keep"})
    assert (refused.status_code, refused.json()["code"]) == (422, "unknown_field")
    assert (await rig.http.post("/models/chat/unpause")).status_code == 200
    assert (rig.rank().gate.open, rig.rank().gate.running) == (True, 1)
    assert (await rig.http.post("/models/nobody/unpause")).status_code == 404


async def test_a_request_to_a_paused_model_is_refused_with_the_reason(rig: Rig) -> None:
    """G3: nothing but its end opens it, so that nobody waits."""
    await rig.http.post("/pause")
    said = await rig.http.post("/v1/completions", json={"model": "chat", "prompt": "x"})
    assert (said.status_code, said.json()["code"]) == (503, "gate_closed")
    assert "paused" in said.json()["detail"] and said.headers["Retry-After"]


async def test_requests_are_aborted_by_the_id_of_their_answer_or_all_and_keep_what_they_have(
    wide_rig: Rig,
) -> None:
    """G2's abort, without a sleep; G1: whichever front end sent them."""
    http, inference = wide_rig.http, wide_rig.inference
    inference.endless, inference.delay_s = True, 0.01

    def ask(**fields: object) -> asyncio.Task[httpx.Response]:
        body = {"model": "chat", "prompt": "Hello", **fields}
        return asyncio.create_task(http.post("/v1/completions", json=body))

    mine, others = ask(rid="mine", n=2), [ask(), ask(rid="mine-too")]
    async with asyncio.timeout(10):
        while len(inference.speaking) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    done = await http.post("/m/chat/abort_request", json={"rid": "mine"})
    assert (done.status_code, done.json()) == (200, {"aborted_requests": 2})
    ended = (await mine).json()
    assert ended["id"] == "mine"
    assert [choice["finish_reason"] for choice in ended["choices"]] == ["abort"] * 2
    assert all(choice["text"] for choice in ended["choices"])
    assert not any(task.done() for task in others)
    again = await http.post("/m/chat/abort_request", json={"rid": "mine"})
    assert (again.status_code, again.json()) == (200, {"aborted_requests": 0})
    await http.post("/abort_request", json={"model": "chat", "abort_all": True})
    for task in others:
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"
    assert (await http.post("/m/chat/abort_request", json={})).status_code == 422
    assert wide_rig.rank().gate.open


async def test_a_mount_asks_for_the_role_that_the_call_itself_wants(tmp_path: Path) -> None:
    """Also with a slash at its end: neither way round the guard leads past it."""
    tokens = "looks viewer viewer-token-0123456789\nruns operator operator-token-0123456789\n"
    async with make_rig(tmp_path, {"chat": 1}, tokens=tokens) as rig:
        looks = {"Authorization": "Bearer viewer-token-0123456789"}
        runs = {"Authorization": "Bearer operator-token-0123456789"}
        for path in ("/m/chat/sleep?level=1", "/m/chat/sleep/?level=1", "/m/chat/flush_cache/"):
            assert (await rig.http.post(path)).status_code == 401
            assert (await rig.http.post(path, headers=looks)).status_code == 403
            assert (await rig.http.post("/m/m/chat" + path, headers=runs)).status_code == 404
            assert rig.rank().gate.open
        assert (await rig.http.get("/m/chat/is_sleeping/", headers=looks)).status_code == 200
        assert (await rig.http.post("/m/chat/sleep/?level=1", headers=runs)).status_code == 200
        assert not rig.rank().gate.open
