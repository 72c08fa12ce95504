"""Every route for every role: nothing is open by mistake, and no token is told to anybody."""

from __future__ import annotations

import io
import re
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from service_fakes import MemoryInference
from service_rig import Rig, app_over, client_of, config_of, make_rig, tokens_file

from torpor.actors.ports import ControlUnreachable
from torpor.service.auth.access import AccessTable

TOKENS = {
    "viewer": "viewer-token-0123456789",
    "inference": "inference-token-0123456789",
    "operator": "operator-token-0123456789",
    "admin": "admin-token-0123456789",
}
FILE = "".join(f"{name}-name {name} {token}\n" for name, token in TOKENS.items())
V, I, O, A = "viewer", "inference", "operator", "admin"  # noqa: E741
ALL_BUT_INFERENCE = {V, O, A}


def bearer(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[role]}"}


class NobodyThere:
    """A Control that never does anything: who is let in to it gets 503."""

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            raise ControlUnreachable("no coordinator")

        return call


@pytest.fixture
def bare(tmp_path: Path) -> FastAPI:
    """No call can do anything here, whoever makes it; streams end at once."""
    log = io.StringIO()
    control: Any = NobodyThere()
    inference = MemoryInference(models=())
    tokens = tokens_file(tmp_path, FILE, log)
    app = app_over(control, inference, config_of({"chat": 1}, tmp_path / "j"), log, tokens=tokens)
    app.state.context.ending.set()
    return app


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with make_rig(tmp_path, {"chat": 1}, tokens=FILE) as made:
        yield made


def calls_of(routes: Iterable[Any], prefix: str = "") -> list[tuple[str, str]]:
    """(method, path) of every route there is, also of those that no documentation shows."""
    found = []
    for context in iter_route_contexts(list(routes)):
        path = prefix + str(context.path)
        below = getattr(context, "routes", None)
        if below:
            found += calls_of(below, path)
            continue
        assert context.methods, f"{path} is no plain call; teach the guard and this test about it"
        found += [(method, path) for method in sorted(context.methods) if method != "HEAD"]
    return found


def expected(method: str, path: str) -> set[str] | None:
    """Who may, said once more in other words than the table's; None = everybody."""
    path = re.sub(r"^/m/\{\w+\}(?=/)", "", path)
    if path in ("/livez", "/readyz", "/health"):
        return None
    if path.startswith("/v1/") or path == "/health_generate":
        return ALL_BUT_INFERENCE | {I} if method == "GET" else {I}
    if path == "/abort_request":
        return {I}
    ends = path.rsplit("/", 1)[-1]
    if (
        method in ("DELETE", "PUT", "PATCH")
        or ends in ("recover", "audit")
        or ends.startswith("update_weights")
    ):
        return {A}
    if method == "POST" or ends == "flush_cache":
        return {O, A}
    return ALL_BUT_INFERENCE


async def test_every_route_asks_for_its_role_and_nothing_is_open_by_mistake(bare: FastAPI) -> None:
    calls = calls_of(bare.routes)
    assert len(calls) > 25
    wrong = []
    async with client_of(bare) as http:
        for method, path in calls:
            concrete = re.sub(r"\{\w+(:\w+)?\}", "chat", path)
            allowed = expected(method, path)
            nobody = await http.request(method, concrete)
            if (nobody.status_code != 401) != (allowed is None):
                wrong.append(f"{method} {path} answers {nobody.status_code} to nobody")
            for role in TOKENS:
                answer = await http.request(method, concrete, headers=bearer(role))
                let_in = answer.status_code not in (401, 403)
                if let_in != (allowed is None or role in allowed):
                    wrong.append(f"{method} {path} answers {answer.status_code} to {role}")
    assert not wrong, "\n".join(wrong)


def test_every_route_has_a_line_of_its_own_in_the_table(bare: FastAPI) -> None:
    """A route without one is refused to everybody; one that another's line catches has that one's role."""
    table = AccessTable()
    wrong = []
    for method, path in calls_of(bare.routes):
        call = table.find(method, re.sub(r"\{\w+(:\w+)?\}", "chat", path))
        plain = re.sub(r"^/m/\{\w+\}(?=/)", "", path)
        if call is None or _shape(call.path) != _shape(plain):
            wrong.append(f"{method} {path}: {call}; add it to service/auth/access.py")
    assert not wrong, "\n".join(wrong)


def test_every_line_of_the_table_has_a_route(bare: FastAPI) -> None:
    """One without would give its role to whatever is put there one day."""
    routes = {(method, _shape(re.sub(r":\w+(?=\})", "", path))) for method, path in calls_of(bare.routes)}
    idle = [
        f"{call.method} {call.path}"
        for call in AccessTable()
        if (call.method, _shape(call.path)) not in routes
    ]
    assert not idle, f"no such route; take it out of service/auth/access.py: {', '.join(idle)}"


def _shape(path: str) -> str:
    return re.sub(r"\{\w+\}", "{}", path)


async def test_a_route_that_nobody_has_put_into_the_table_is_refused_to_all(bare: FastAPI) -> None:
    @bare.get("/forgotten")
    def forgotten() -> str:
        return "secret"

    assert ("GET", "/forgotten") in calls_of(bare.routes)
    async with client_of(bare) as http:
        assert (await http.get("/forgotten")).status_code == 401
        for role in TOKENS:
            answer = await http.get("/forgotten", headers=bearer(role))
            assert (answer.status_code, answer.json()["code"]) == (404, "no_such_path")


@pytest.mark.parametrize(
    ("headers", "challenge"),
    [
        ([], 'Bearer realm="torpor"'),
        ([("Authorization", "Bearer")], 'Bearer realm="torpor"'),
        ([("Authorization", f"Basic {TOKENS[A]}")], 'Bearer realm="torpor"'),
        ([("Authorization", f"Bearer {TOKENS[A]}")] * 2, 'Bearer realm="torpor"'),
        ([("Authorization", "Bearer nobody-has-this-token")], 'Bearer realm="torpor", error="invalid_token"'),
        ([("Authorization", f"Bearer {TOKENS[A]}x")], 'Bearer realm="torpor", error="invalid_token"'),
        ([("Authorization", b"Bearer \xff\xfe")], 'Bearer realm="torpor", error="invalid_token"'),
    ],
)
async def test_who_has_no_token_is_told_how_to_bring_one(
    rig: Rig, headers: list[Any], challenge: str
) -> None:
    answer = await rig.http.post("/sleep", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    assert answer.headers["WWW-Authenticate"] == challenge
    assert answer.headers["content-type"] == "application/problem+json"
    assert "Authorization: Bearer TOKEN" in answer.json()["hint"]
    assert rig.rank().gate.open


async def test_who_lacks_the_role_is_told_which_it_is(rig: Rig) -> None:
    answer = await rig.http.post("/sleep", headers=bearer(V))
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert answer.json()["roles"] == ["operator"]
    assert 'error="insufficient_scope"' in answer.headers["WWW-Authenticate"]
    assert "'viewer-name' may not POST /sleep: it wants the role operator" in answer.json()["detail"]
    assert rig.rank().gate.open
    openai = await rig.http.post("/v1/completions", headers=bearer(V), json={"model": "chat", "prompt": "x"})
    assert openai.json()["error"]["type"] == "permission_error"


async def test_a_known_path_with_another_method_is_405_and_an_unknown_one_404(rig: Rig) -> None:
    wrong = await rig.http.request("PUT", "/models/chat", headers=bearer(V))
    assert (wrong.status_code, wrong.headers["Allow"]) == (405, "DELETE, GET")
    assert (await rig.http.get("/models/chat/nothing", headers=bearer(A))).status_code == 404
    assert (await rig.http.get("/sleep/x", headers=bearer(A))).status_code == 404


async def test_the_scheme_s_case_and_head_requests_do_not_matter(rig: Rig) -> None:
    assert (
        await rig.http.get("/models", headers={"authorization": f"bEARER  {TOKENS[V]}"})
    ).status_code == 200
    assert (await rig.http.head("/docs", headers=bearer(V))).status_code == 200
    assert (await rig.http.head("/docs")).status_code == 401


async def test_a_hold_and_the_log_name_the_caller_by_its_token_s_name(rig: Rig) -> None:
    await rig.http.post("/sleep", headers=bearer(O))
    view = (await rig.http.get("/models/chat", headers=bearer(V))).json()
    assert view["holds"][0]["by"].startswith("operator-name at ")
    assert [line.get("caller") for line in rig.log_lines()] == ["operator-name", "viewer-name"]


async def test_idempotency_keys_are_each_caller_s_own(rig: Rig) -> None:
    """C5: one caller must not be answered with what another one has asked for."""
    key = {"Idempotency-Key": "1"}
    first = await rig.http.post("/sleep", headers=bearer(O) | key)
    again = await rig.http.post("/sleep", headers=bearer(O) | key)
    other = await rig.http.post("/sleep", headers=bearer(A) | key, json={"tags": ["weights"]})
    assert first.json()["id"] == again.json()["id"] != other.json()["id"]
    assert other.status_code == 200


async def test_prefixes_are_shared_within_a_caller_or_a_salt_and_never_by_guessing(rig: Rig) -> None:
    async def scope(role: str, **fields: str) -> str:
        asked = {"model": "chat", "prompt": "x"} | fields
        assert (await rig.http.post("/v1/completions", headers=bearer(role), json=asked)).status_code == 200
        return rig.inference.seen[-1].scope

    own = await scope(I)
    assert own == await scope(I, cache_salt="") != await scope(I, cache_salt="team")
    guesses = ["inference-name", own, f"caller:{own}", TOKENS[I]]
    assert own not in [await scope(I, cache_salt=guess) for guess in guesses]


async def test_no_token_is_in_logs_problems_or_the_journal(rig: Rig, tmp_path: Path) -> None:
    """Neither one that is known nor one that was tried."""
    tried = "tried-token-0123456789"
    told = []
    for token in (*TOKENS.values(), tried):
        for method, path in (("POST", "/sleep"), ("POST", "/wake"), ("GET", "/models"), ("DELETE", "/x")):
            headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "k"}
            told.append(await rig.http.request(method, path, headers=headers))
        told.append(await rig.http.post("/v1/completions", headers={"Authorization": f"Bearer {token}"}))
        told.append(await rig.http.post("/sleep", headers={"Authorization": token}))
    assert {answer.status_code for answer in told} >= {200, 401, 403}
    kept = bytes_in(tmp_path)
    assert b"operator-name" in kept
    for token in (*TOKENS.values(), tried):
        assert token not in rig.log.getvalue()
        assert token.encode() not in kept
        assert not any(token in answer.text or token in str(answer.headers) for answer in told)


def bytes_in(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob("journal.db*"))


async def test_without_a_tokens_file_everybody_may_everything(tmp_path: Path) -> None:
    async with make_rig(tmp_path, {"chat": 1}) as made:
        assert (await made.http.post("/sleep")).status_code == 200
        assert (await made.http.post("/wake", headers=bearer(V))).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://127.0.0.1:8700", 200),
        ("http://localhost:3000", 200),
        ("http://[::1]:8700", 200),
        ("https://evil.example", 403),
        ("http://127.0.0.1.evil.example:8700", 403),
        ("http://127.0.0.1@evil.example", 403),
        ("null", 403),
        ("http://[::1", 403),
    ],
)
async def test_a_web_page_of_elsewhere_may_not_use_a_browser_here(
    tmp_path: Path, origin: str | None, status: int
) -> None:
    """Without tokens, whoever reaches the address may do everything; a browser here reaches it for every page."""
    headers = {} if origin is None else {"Origin": origin}
    async with make_rig(tmp_path, {"chat": 1}) as made:
        assert (await made.http.post("/sleep", headers=headers)).status_code == status
        assert made.rank().gate.open is (status == 403)


async def test_with_tokens_a_page_that_has_one_may_call(rig: Rig) -> None:
    headers = bearer(O) | {"Origin": "https://console.example"}
    assert (await rig.http.post("/sleep", headers=headers)).status_code == 200


async def test_a_socket_that_is_no_http_is_closed(bare: FastAPI) -> None:
    sent = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await bare({"type": "websocket", "path": "/models", "headers": [], "app": bare}, receive, send)
    assert sent == ["websocket.close"]
