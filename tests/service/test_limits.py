"""The bounds of a front end: what is beyond them is refused at once, says when to come again, and begins nothing."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from service_fakes import MemoryInference
from service_rig import Rig, app_over, client_of, config_of, make_rig
from test_access import FILE, TOKENS, bearer

from torpor.service.limits.bounds import Bounds
from torpor.service.limits.rates import Rates
from torpor.service.problems import Problem
from torpor.service.settings.load import SettingsError, load_settings

ASK = {"model": "chat", "prompt": "x"}


@asynccontextmanager
async def rig_within(folder: Path, tokens: str | None = None, **bounds: Any) -> AsyncIterator[Rig]:
    async with make_rig(folder, {"chat": 1}, tokens=tokens, bounds=replace(Bounds(), **bounds)) as made:
        yield made


async def limited(http: httpx.AsyncClient, **headers: str) -> dict[str, float]:
    """Refusals by limit, as scraped."""
    text = (await http.get("/metrics", headers=headers)).text
    return {
        sample.labels["limit"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "torpor_limited_requests_total"
    }


async def test_a_body_at_the_bound_is_read_and_one_beyond_is_413(tmp_path: Path) -> None:
    async with rig_within(tmp_path, body_bytes=2048) as rig:
        fits = b"{}".ljust(2048)
        assert (await rig.http.post("/wake", content=fits)).status_code == 200
        for path in ("/sleep", "/release_memory", "/release_memory_occupation", "/v1/completions"):
            answer = await rig.http.post(path, content=fits + b" ")
            assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large"), path
            assert "larger than 2048 bytes (limits.body_bytes)" in answer.json()["detail"]
        assert rig.rank().gate.open
        assert await limited(rig.http) == {"body_bytes": 4}


async def test_a_body_without_a_length_is_counted_as_it_comes(tmp_path: Path) -> None:
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1024
            yield b" " * 1024

    async with rig_within(tmp_path, body_bytes=4096) as rig:
        answer = await asyncio.wait_for(rig.http.post("/sleep", content=endless()), 5)
    assert (answer.status_code, taken) == (413, 5120)


@pytest.mark.parametrize("path", ["/sleep", "/v1/completions", "/wake_up"])
async def test_a_client_that_leaves_amid_its_body_is_no_fault_of_ours(tmp_path: Path, path: str) -> None:
    parts = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return parts.pop(0) if len(parts) > 1 else parts[0]

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
    }
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""}
    headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    scope |= {"headers": headers, "client": ("127.0.0.1", 9), "server": ("127.0.0.1", 8700)}
    async with rig_within(tmp_path) as rig:
        await rig.app(scope, receive, send)
        assert sent[0]["status"] == 499
        assert "unexpected error" not in rig.log.getvalue()
        assert rig.rank().gate.open


async def test_a_body_that_does_not_come_gives_its_place_back(tmp_path: Path) -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with rig_within(tmp_path, body_timeout_s=0.1, control_requests=1) as rig:
        answer = await asyncio.wait_for(rig.http.post("/sleep", content=stuck()), 5)
        assert (answer.status_code, answer.json()["code"]) == (408, "body_too_slow")
        assert (await rig.http.post("/sleep")).status_code == 200


async def test_what_wakes_a_model_finds_a_place_while_its_inference_has_none_left(tmp_path: Path) -> None:
    async with rig_within(tmp_path, inference_requests=2) as rig:
        rig.inference.endless, rig.inference.delay_s = True, 0.01
        running = [asyncio.create_task(rig.http.post("/v1/completions", json=ASK)) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert len(rig.inference.running) == 2
        refused = await rig.http.post("/v1/completions", json=ASK)
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        assert refused.headers["Retry-After"] == "1"
        assert "2 (limits.inference_requests)" in refused.json()["detail"]
        assert len(rig.inference.seen) == 2
        assert (await rig.http.get("/models")).status_code == 200
        assert (await rig.http.post("/abort_request", json={"rid": "none"})).status_code == 200
        assert await limited(rig.http) == {"inference_requests": 1}
        rig.inference.ended = True
        await asyncio.gather(*running)
        rig.inference.endless = rig.inference.ended = False
        assert (await rig.http.post("/v1/completions", json=ASK)).status_code == 200


class _Hanging:
    """A coordinator whose answers take until they may come."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> list[Any]:
            await self.go.wait()
            return []

        return call


@pytest.mark.parametrize(("path", "bound"), [("/models", "control_requests"), ("/events", "event_streams")])
async def test_other_calls_and_event_streams_have_bounds_of_their_own_and_probes_none(
    tmp_path: Path, path: str, bound: str
) -> None:
    control: Any = _Hanging()
    bounds = replace(Bounds(), **{bound: 2})  # type: ignore[arg-type]
    config = config_of({"chat": 1}, tmp_path / "j")
    app = app_over(control, MemoryInference(), config, io.StringIO(), bounds=bounds)
    async with client_of(app) as http:
        inside = [asyncio.create_task(http.get(path)) for _ in range(2)]
        await asyncio.sleep(0.05)
        refused = await http.get(path)
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        assert f"2 (limits.{bound})" in refused.json()["detail"]
        assert (await http.get("/livez")).status_code == 200
        app.state.context.ending.set()
        control.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*inside)} == {200}
        assert (await http.get(path)).status_code == 200


def test_a_bucket_holds_a_burst_and_fills_at_its_rate_up_to_that() -> None:
    now_s, refused = 0.0, []
    rates = Rates(2.0, 3, refused.append, clock=lambda: now_s)

    def come(who: str, times: int) -> int:
        passed = 0
        for _ in range(times):
            try:
                rates.count(who)
                passed += 1
            except Problem as problem:
                assert (problem.status, problem.headers) == (429, {"Retry-After": "1"})
        return passed

    assert (come("a", 5), come("b", 2)) == (3, 2)
    assert refused == ["rate", "rate"]
    now_s = 1.0
    assert come("a", 5) == 2
    now_s = 100.0
    assert come("a", 5) == 3


def test_who_comes_from_made_up_addresses_is_remembered_in_bounded_memory() -> None:
    rates = Rates(1.0, 1, clock=lambda: 0.0)
    for number in range(20_000):
        rates.count(f"address {number}")
    assert len(rates._buckets) == 10_000


def test_a_slow_rate_says_how_long_to_wait() -> None:
    rates = Rates(0.1, 1, clock=lambda: 0.0)
    rates.count("a")
    with pytest.raises(Problem) as caught:
        rates.count("a")
    assert caught.value.headers == {"Retry-After": "10"}


async def test_each_token_has_a_rate_of_its_own_and_who_has_none_his_address_s(tmp_path: Path) -> None:
    async with rig_within(tmp_path, FILE, requests_per_s=0.001, burst=3) as rig:
        viewer = [(await rig.http.get("/models", headers=bearer("viewer"))).status_code for _ in range(5)]
        nobody = [(await rig.http.get("/models")).status_code for _ in range(5)]
        probes = {(await rig.http.get("/livez")).status_code for _ in range(5)}
        sleeps = [await rig.http.post("/sleep", headers=bearer("operator")) for _ in range(4)]
        assert (viewer, nobody, probes) == ([200] * 3 + [429] * 2, [401] * 3 + [429] * 2, {200})
        assert [answer.status_code for answer in sleeps] == [200] * 3 + [429]
        assert "caller operator-name sends more than 0.001 requests a second" in sleeps[3].json()["detail"]
        assert int(sleeps[3].headers["Retry-After"]) > 100
        audit = (await rig.http.get("/audit", headers=bearer("admin"))).json()["audit"]
        assert [entry["status"] for entry in audit] == [200] * 3, "a flood does not push the audit out"
        assert await limited(rig.http, **bearer("admin")) == {"rate": 5}
        assert not any(token in rig.log.getvalue() for token in TOKENS.values())


async def test_without_tokens_an_address_has_the_rate_and_null_is_none(tmp_path: Path) -> None:
    async with rig_within(tmp_path, requests_per_s=0.001, burst=1) as rig:
        assert [(await rig.http.get("/models")).status_code for _ in range(2)] == [200, 429]
    async with rig_within(tmp_path, requests_per_s=None, burst=1) as rig:
        assert {(await rig.http.get("/models")).status_code for _ in range(5)} == {200}


def test_limits_are_settings_with_the_defaults_of_the_code() -> None:
    assert Bounds(**load_settings(None, {}).limits.model_dump()) == Bounds()
    settings = load_settings(
        None, {"TORPOR_LIMITS__BODY_BYTES": "1MiB", "TORPOR_LIMITS__REQUESTS_PER_S": "5"}
    )
    assert (settings.limits.body_bytes, settings.limits.requests_per_s) == (1 << 20, 5.0)
    assert load_settings(None, {"TORPOR_LIMITS__REQUESTS_PER_S": "null"}).limits.requests_per_s is None
    for name, wrong in (("BODY_BYTES", "12"), ("BURST", "0"), ("REQUESTS_PER_S", "-1"), ("QUEUES", "1")):
        with pytest.raises(SettingsError, match=rf"limits\.{name.lower()}: "):
            load_settings(None, {f"TORPOR_LIMITS__{name}": wrong})
