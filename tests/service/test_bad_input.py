"""Every wrong request gets a status, a code and a hint; and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from service_rig import Rig

from torpor.actors.coordinator.memory import Fault

Headers = Mapping[str, str]
# (method and path, body, headers, status, code, what the hint or detail must say)
BAD: list[tuple[str, str | None, Headers, int, str, str]] = [
    ("POST /sleep", '{"tags": ["weights"', {}, 400, "malformed_json", "JSON object"),
    ("POST /sleep", '["weights"]', {}, 400, "malformed_json", "no object"),
    ("POST /sleep", "level=1", {}, 400, "malformed_json", "JSON object"),
    ("POST /sleep", '{"pad": "' + "x" * (17 << 20) + '"}', {}, 413, "body_too_large", "Send less"),
    ("POST /sleep", '{"model": "\\ud800"}', {}, 400, "malformed_json", "no Unicode text"),
    ("POST /sleep", '{"models": "chat"}', {}, 422, "invalid_field", "models: Input"),
    ("POST /sleep", '{"tags": []}', {}, 400, "empty_tags", "Leave `tags` out"),
    ("POST /wake", '{"tags": []}', {}, 400, "empty_tags", "Leave `tags` out"),
    ("POST /release_memory", '{"tags": []}', {}, 400, "empty_tags", "Leave `tags` out"),
    ("POST /resume_memory", '{"tags": []}', {}, 400, "empty_tags", "Leave `tags` out"),
    ("POST /sleep", '{"tags": ["wieghts"]}', {}, 400, "unknown_tag", "weights"),
    ("POST /release_memory", '{"tags": ["wieghts"]}', {}, 400, "unknown_tag", "weights"),
    ("POST /sleep", '{"restore": {"wieghts": "cpu"}}', {}, 400, "unknown_tag", "weights"),
    ("POST /sleep", '{"tags": ["weights"], "restore": {"kv_cache": "cpu"}}', {}, 422, "invalid_field", "kv_cache, and"),
    ("POST /sleep", '{"tags": "weights"}', {}, 422, "invalid_field", "tags"),
    ("POST /sleep", '{"tags": [1]}', {}, 422, "invalid_field", "tags.0"),
    ("POST /sleep", '{"tag": ["weights"]}', {}, 422, "unknown_field", "tags"),
    ("POST /wake", '{"restore": {}}', {}, 422, "unknown_field", "restore"),
    ("POST /sleep", '{"drain": {"mood": "finish"}}', {}, 422, "unknown_field", "timeout_s"),
    ("POST /sleep", '{"restore": {"weights": "tape"}}', {}, 422, "unknown_mode", "none, memset, cpu, pinned, disk"),
    ("POST /sleep", '{"drain": {"mode": "wait"}}', {}, 422, "unknown_mode", "finish, abort"),
    ("POST /sleep", '{"drain": {"freeze_timeout_s": 5}}', {}, 422, "invalid_field", "goes with mode freeze"),
    ("POST /sleep", '{"drain": {"mode": "freeze", "freeze_timeout_s": 0}}', {}, 422, "invalid_field", "greater"),
    ("POST /sleep", '{"timeout_s": 0}', {}, 422, "invalid_field", "timeout_s"),
    ("POST /sleep", '{"timeout_s": "soon"}', {}, 422, "invalid_field", "timeout_s"),
    ("POST /sleep", '{"timeout_s": NaN}', {}, 422, "invalid_field", "timeout_s"),
    ("POST /sleep", '{"dry_run": "yes"}', {}, 422, "invalid_field", "dry_run"),
    ("POST /sleep", '{"on_conflict": "fight"}', {}, 422, "invalid_field", "on_conflict"),
    ("POST /sleep", '{"overflow": "spill"}', {}, 422, "invalid_field", "overflow"),
    ("POST /sleep", '{"model": "nobody"}', {}, 404, "unknown_model", "chat, draft"),
    ("POST /sleep?model=nobody", None, {}, 404, "unknown_model", "chat, draft"),
    ("POST /wake?id=nobody", None, {}, 404, "unknown_model", "chat, draft"),
    ("POST /sleep?model=chat&id=draft", None, {}, 422, "invalid_field", "chat, draft"),
    ("POST /models/chat/sleep?model=draft", None, {}, 422, "invalid_field", "chat, draft"),
    ("POST /m/chat/wake?model=draft", None, {}, 422, "invalid_field", "chat, draft"),
    ("POST /sleep?model=chat", '{"model": "draft"}', {}, 422, "invalid_field", "once"),
    ("POST /models/chat/sleep?dry_run=true", None, {}, 422, "invalid_field", "dry_run, which"),
    ("POST /models/chat/wake?make_room=idle", None, {}, 422, "invalid_field", "in the body"),
    ("POST /models/nobody/sleep", None, {}, 404, "unknown_model", "chat, draft"),
    ("POST /models/nobody/wake", None, {}, 404, "unknown_model", "chat, draft"),
    ("POST /sleep", '{"models": ["chat", "nobody"]}', {}, 404, "unknown_model", "chat, draft"),
    ("POST /sleep", '{"models": []}', {}, 422, "invalid_field", "models"),
    ("POST /sleep", '{"model": "chat", "models": ["draft"]}', {}, 422, "invalid_field", "exclude"),
    ("POST /models/chat/sleep", '{"model": "draft"}', {}, 422, "invalid_field", "once"),
    ("POST /sleep", "{}", {}, 400, "model_required", "chat, draft"),
    ("POST /release_memory", None, {}, 400, "model_required", "chat, draft"),
    ("GET /memory_status", None, {}, 400, "model_required", "chat, draft"),
    ("POST /models/chat/sleep", "{}", {"If-Match": '"77"'}, 412, "generation", "GET /models/chat"),
    ("POST /sleep", '{"models": "*"}', {"If-Match": '"0"'}, 422, "invalid_field", "Name one model"),
    ("GET /models/nobody", None, {}, 404, "unknown_model", "chat, draft"),
    ("GET /operations/op-0", None, {}, 404, "unknown_operation", "GET /operations"),
    ("POST /operations/op-0/cancel", None, {}, 404, "unknown_operation", "GET /operations"),
    ("GET /operations?model=nobody", None, {}, 404, "unknown_model", "chat, draft"),
    ("GET /operations?limit=0", None, {}, 422, "invalid_field", "limit"),
    ("GET /nowhere", None, {}, 404, "no_such_path", "/docs"),
    ("GET /sleep", None, {}, 405, "method_not_allowed", "/docs"),
    ("POST /v1/chat/completions", "{", {}, 400, "malformed_json", "JSON object"),
    ("POST /v1/chat/completions", "{}", {}, 400, "invalid_request", "model"),
    ("POST /v1/chat/completions", '{"model": "chat"}', {}, 400, "invalid_request", "messages"),
    ("POST /v1/chat/completions", '{"model": "chat", "messages": []}', {}, 400, "invalid_request", "messages"),
    ("POST /v1/completions", '{"model": "chat"}', {}, 400, "invalid_request", "prompt"),
    ("POST /v1/completions", '{"model": "chat", "prompt": []}', {}, 400, "invalid_request", "prompt"),
    ("POST /v1/completions", '{"model": "nobody", "prompt": "x"}', {}, 404, "unknown_model", "chat, draft"),
    ("POST /v1/completions", '{"model":"chat","prompt":"x","n":17}', {}, 400, "invalid_request", "n"),
    ("POST /v1/completions", '{"model":"chat","prompt":"x","n":true}', {}, 400, "invalid_request", "n"),
    ("POST /v1/completions", '{"model":"chat","prompt":"x","top_p":false}', {}, 400, "invalid_request", "top_p"),
    ("POST /v1/completions", '{"model":"chat","prompt":"x","seed":true}', {}, 400, "invalid_request", "seed"),
    ("POST /v1/completions", '{"model":"chat","prompt":"x","top_k":true}', {}, 400, "invalid_request", "top_k"),
    ("POST /v1/completions", '{"model":"chat","prompt":"x","max_tokens":0}', {}, 400, "invalid_request", "max_tokens"),
    ("POST /v1/completions", '{"model":"chat","prompt":"x","temperature":9}', {}, 400, "invalid_request", "temperature"),
    ("POST /v1/completions", '{"model":"chat","prompt":"x","top_p":0}', {}, 400, "invalid_request", "top_p"),
    ("POST /v1/completions", '{"model":"chat","prompt":"x","best_of":3}', {}, 400, "unsupported_parameter", "best_of"),
    ("GET /v1/models/nobody", None, {}, 404, "unknown_model", "chat, draft"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "body", "headers", "status", "code", "says"), BAD)
async def test_bad_input_is_told_with_status_code_and_hint_and_changes_nothing(
    wide_rig: Rig, call: str, body: str | None, headers: Headers, status: int, code: str, says: str
) -> None:
    method, path = call.split()
    before = (await wide_rig.http.get("/models")).json()
    answer = await wide_rig.http.request(method, path, content=_named(path, body), headers=dict(headers))
    problem = answer.json()
    assert (answer.status_code, problem["status"], problem["code"]) == (status, status, code), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["hint"]
    assert says in f"{problem['detail']} {problem['hint']} {problem.get('known_tags', '')}"
    if path.startswith("/v1/"):
        assert set(problem["error"]) == {"message", "type", "param", "code"}
        assert says in problem["error"]["message"]
    assert (await wide_rig.http.get("/models")).json() == before
    assert all(model["state"] == "awake" for model in before["models"])


def _named(path: str, body: str | None) -> str | None:
    """Tag errors want a model: with two of them one has to be named."""
    if body is not None and path in ("/sleep", "/release_memory") and "wieghts" in body:
        return body.replace("{", '{"model": "chat", ', 1)
    return body


ENDS: list[tuple[str, Fault, int, str]] = [
    ("preflight", Fault.REFUSE, 409, "refused"),
    ("preflight", Fault.OTHER_DIGEST, 409, "digest_mismatch"),
    ("stage", Fault.REFUSE, 409, "refused"),
    ("stage", Fault.HANG, 504, "stage_timeout"),
]


@pytest.mark.parametrize(("method", "fault", "status", "code"), ENDS)
async def test_a_rejected_operation_says_who_and_what_and_leaves_the_model_awake(
    wide_rig: Rig, method: str, fault: Fault, status: int, code: str
) -> None:
    """C6: the problem carries the operation, its id and its ranks."""
    wide_rig.rank("chat", 1).fault(method, fault)
    answer = await wide_rig.http.post("/models/chat/sleep", json={"timeout_s": 1})
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (status, code), answer.text
    assert problem["hint"]
    assert len(problem["ranks"]) == 3
    record = (await wide_rig.http.get(f"/operations/{problem['operation_id']}")).json()
    assert record["state"] == "rejected"
    model = (await wide_rig.http.get("/models/chat")).json()
    assert (model["state"], model["gate"]["open"]) == ("awake", True)


async def test_a_silent_rank_is_504_and_not_called_failed(wide_rig: Rig) -> None:
    """C6, F8: no answer in time is unknown; the caller's own timeout_s may be what was short."""
    wide_rig.rank("chat", 1).fault("preflight", Fault.HANG)
    answer = await wide_rig.http.post("/models/chat/sleep", json={"timeout_s": 0.2})
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (504, "stage_timeout"), answer.text
    assert "no answer in time from rank 1" in problem["detail"]
    assert "longer `timeout_s`" in problem["hint"]
    assert (await wide_rig.http.get("/models/chat")).json()["state"] == "awake"


async def test_a_drain_out_of_time_is_504_and_says_how_to_force_it(rig: Rig) -> None:
    rig.rank().gate.running = 2
    answer = await rig.http.post("/sleep", json={"drain": {"timeout_s": 0.1}})
    assert (answer.status_code, answer.json()["code"]) == (504, "drain_timeout"), answer.text
    assert '"mode": "abort"' in answer.json()["hint"]
    assert (await rig.http.post("/sleep", json={"drain": {"mode": "abort"}})).json()["aborted_requests"] == 2


async def test_a_sleep_that_wants_an_idle_model_is_409_while_anything_runs(rig: Rig) -> None:
    """G2."""
    rig.rank().gate.running = 1
    answer = await rig.http.post("/sleep", json={"drain": {"mode": "if_idle"}})
    assert (answer.status_code, answer.json()["code"]) == (409, "not_idle"), answer.text
    assert "nothing was changed" in answer.json()["hint"]
    model = (await rig.http.get("/models/chat")).json()
    assert (model["state"], model["gate"]["open"]) == ("awake", True)
    rig.rank().gate.running = 0
    answer = await rig.http.post("/sleep", json={"drain": {"mode": "if_idle"}})
    assert (answer.status_code, answer.json()["state"]) == (200, "succeeded"), answer.text


async def test_a_wake_without_room_is_507_with_needed_and_free_bytes(rig: Rig) -> None:
    """M4: another owner has taken the device meanwhile; a later wake succeeds."""
    await rig.http.post("/sleep", json={})
    device = rig.cluster.devices[0]
    taken = device.free_bytes - 1000
    assert device.take("somebody", taken)
    answer = await rig.http.post("/wake", json={})
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (507, "device_memory"), answer.text
    assert problem["needed_bytes"] > problem["free_bytes"] >= 0
    assert (await rig.http.get("/models/chat")).json()["state"] == "asleep"
    device.give("somebody", taken)
    assert (await rig.http.post("/wake", json={})).status_code == 200


async def test_a_commit_that_fails_is_500_and_the_gate_stays_closed(rig: Rig) -> None:
    rig.rank().fault("commit", Fault.DIE)
    answer = await rig.http.post("/sleep", json={})
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (500, "operation_failed"), answer.text
    assert problem["operation"]["state"] == "failed"
    assert (await rig.http.get("/models/chat")).json()["state"] == "failed"
    again = await rig.http.post("/wake", json={})
    assert (again.status_code, again.json()["code"]) == (409, "wrong_state")
    assert "POST /models/chat/recover" in again.json()["hint"]


async def test_an_unexpected_error_is_a_problem_too_and_is_logged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(detail: bool = False) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rig.coordinator, "models", broken)
    answer = await rig.http.get("/models")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert any("a bug" in str(line.get("exception")) for line in rig.log_lines())
