"""Probes, metrics, documentation, logs."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from service_fakes import MemoryInference
from service_rig import Rig, app_over, client_of, config_of

from torpor.actors.coordinator.memory import Fault
from torpor.actors.ports import ControlUnreachable

MIB = 1 << 20


async def scrape(rig: Rig) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = (await rig.http.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def at(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"torpor_{name}", frozenset(labels.items())


async def test_a_service_whose_models_sleep_is_ready_and_stays_asleep(rig: Rig) -> None:
    """G6: probes, metrics and listings never wake anything."""
    await rig.http.post("/sleep", json={})
    for path in ("/livez", "/readyz", "/health", "/metrics", "/v1/models", "/models", "/memory_status"):
        assert (await rig.http.get(path)).status_code == 200, path
    assert (await rig.http.get("/models/chat")).json()["state"] == "asleep"


class _SilentControl:
    """A coordinator that never answers."""

    async def models(self, detail: bool = False) -> None:
        await asyncio.Event().wait()


class _GoneControl:
    async def models(self, detail: bool = False) -> None:
        raise ControlUnreachable("no coordinator; start one with `torpor serve`")


@pytest.mark.parametrize("control", [_SilentControl(), _GoneControl()])
async def test_without_its_coordinator_it_is_alive_but_not_ready(control: object, tmp_path: Path) -> None:
    config = config_of({"chat": 1}, tmp_path / "j")
    app = app_over(control, MemoryInference(), config, io.StringIO())  # type: ignore[arg-type]
    async with client_of(app) as http:
        assert (await http.get("/livez")).status_code == 200
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "coordinator unreachable")
        assert (await http.get("/metrics")).status_code == 200


async def test_a_coordinator_that_is_gone_is_503_with_what_to_do(tmp_path: Path) -> None:
    config = config_of({"chat": 1}, tmp_path / "j")
    app = app_over(_GoneControl(), MemoryInference(), config, io.StringIO())  # type: ignore[arg-type]
    async with client_of(app) as http:
        answer = await http.post("/sleep", json={})
        assert (answer.status_code, answer.json()["code"]) == (503, "coordinator_unreachable")
        assert answer.headers["Retry-After"]


async def test_memory_state_and_free_bytes_follow_a_sleep(wide_rig: Rig) -> None:
    before = await scrape(wide_rig)
    device = wide_rig.cluster.devices[1].id
    weights = at("memory_bytes", model="chat", rank="1", device=device, tag="weights", tier="device")
    free = at("device_free_bytes", model="chat", rank="1", device=device)
    assert before[weights] == 100 * MIB
    assert before[at("model_state", model="chat", state="awake")] == 1
    await wide_rig.http.post("/models/chat/sleep", json={})
    after = await scrape(wide_rig)
    assert after[weights] == 0
    assert after[free] - before[free] == 150 * MIB
    assert (
        after[at("memory_bytes", model="chat", rank="1", device=device, tag="weights", tier="host")]
        == 100 * MIB
    )
    assert after[at("model_state", model="chat", state="awake")] == 0
    assert after[at("model_state", model="chat", state="asleep")] == 1
    assert (after[at("gate_open", model="chat")], after[at("gate_open", model="draft")]) == (0, 1)


async def test_a_silent_rank_does_not_take_the_other_numbers_away(wide_rig: Rig) -> None:
    """A listing waits for it for some seconds; metrics are wanted most just then."""
    wide_rig.rank("chat", 1).fault("status", Fault.HANG, 100)
    samples = await scrape(wide_rig)
    assert samples[at("model_state", model="chat", state="awake")] == 1
    assert samples[at("gate_open", model="draft")] == 1
    assert (samples[at("ranks_in_doubt", model="chat")], samples[at("ranks_in_doubt", model="draft")]) == (
        1,
        0,
    )
    up = [samples[at("rank_up", model="chat", rank=rank)] for rank in "012"]
    assert up == [1, 0, 1]


async def test_operations_count_once_however_often_they_are_scraped(rig: Rig) -> None:
    await rig.http.post("/sleep", json={})
    await rig.http.post("/sleep", json={"dry_run": True})
    await rig.http.post("/wake", json={})
    await rig.http.post("/sleep", json={"tags": ["nothing"]})
    await scrape(rig)
    samples = await scrape(rig)
    assert samples[at("operations_total", model="chat", kind="sleep", outcome="succeeded")] == 1
    assert samples[at("operations_total", model="chat", kind="wake", outcome="succeeded")] == 1
    assert samples[at("operations_total", model="chat", kind="sleep", outcome="rejected")] == 1
    stage = at("operation_phase_duration_seconds_count", model="chat", kind="wake", phase="stage")
    assert samples[stage] == 1


async def test_admissions_are_counted_by_result_and_reason(rig: Rig) -> None:
    asked = {"model": "chat", "prompt": "x"}
    await rig.http.post("/v1/completions", json=asked)
    await rig.http.post("/sleep", json={})
    await rig.http.post("/v1/completions", json=asked)
    samples = await scrape(rig)
    assert samples[at("admissions_total", model="chat", result="admitted", reason="")] == 1
    assert samples[at("admissions_total", model="chat", result="rejected", reason="asleep")] == 1
    assert samples[at("open_requests", model="chat")] == 0


async def test_the_documentation_describes_every_call_and_its_body(rig: Rig) -> None:
    assert (await rig.http.get("/docs")).status_code == 200
    document = (await rig.http.get("/openapi.json")).json()
    calls = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert {
        "POST /sleep",
        "POST /wake",
        "POST /models/{model}/sleep",
        "POST /models/{model}/wake",
        "POST /release_memory",
        "POST /resume_memory",
        "GET /memory_status",
        "GET /models",
        "GET /operations/{operation_id}",
        "POST /operations/{operation_id}/cancel",
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "GET /readyz",
        "GET /metrics",
    } <= calls
    body = document["paths"]["/sleep"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"tags", "restore", "drain", "dry_run", "on_conflict"} <= set(body["properties"])
    assert "$ref" not in str(body)


async def test_every_request_is_logged_with_its_id_and_the_operation_s(rig: Rig) -> None:
    answer = await rig.http.post("/sleep", json={"tags": ["nothing"]}, headers={"X-Request-Id": "mine-7"})
    assert answer.headers["X-Request-Id"] == "mine-7"
    (line,) = rig.log_lines()
    assert (line["request_id"], line["path"], line["status"]) == ("mine-7", "/sleep", 400)
    assert line["operation_id"] == answer.json()["operation_id"]
    done = await rig.http.post("/release_memory")
    assert rig.log_lines()[1]["operation_id"] == done.json()["id"]
    made = await rig.http.get("/models")
    assert len(made.headers["X-Request-Id"]) == 32


async def test_a_request_id_that_could_forge_a_log_line_is_replaced(rig: Rig) -> None:
    answer = await rig.http.get("/models", headers={"X-Request-Id": "a" * 65})
    assert answer.headers["X-Request-Id"] != "a" * 65


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/models", "/models/chat", "/events", "/metrics", "/docs"]
)
async def test_head_answers_as_get_does_without_a_body(rig: Rig, path: str) -> None:
    """Also where a GET would go on for ever."""
    head = await asyncio.wait_for(rig.http.head(path), 5)
    assert (head.status_code, head.content) == (200, b""), head.text
    if path != "/events":
        got = await rig.http.get(path)
        assert head.headers["content-type"] == got.headers["content-type"]
        assert head.headers.get("etag") == got.headers.get("etag")


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/models/nobody", 404), ("/sleep", 405)])
async def test_head_answers_with_the_status_of_what_is_wrong(rig: Rig, path: str, status: int) -> None:
    head = await rig.http.head(path)
    assert (head.status_code, head.content) == (status, b"")
