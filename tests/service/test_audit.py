"""Every change is in the journal, with the name of its caller's token, before its answer goes out."""

from __future__ import annotations

import asyncio
import io
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from service_fakes import MemoryInference
from service_rig import Rig, app_over, client_of, config_of, make_rig
from test_access import FILE, TOKENS, bearer

from torpor.actors.audit import AuditEntry
from torpor.actors.coordinator.audit_table import CREATE_AUDIT, add_entry, entries
from torpor.actors.ports import ControlUnreachable
from torpor.service.cli import tables


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with make_rig(tmp_path, {"chat": 1}, making=True, tokens=FILE) as made:
        yield made


async def audit(rig: Rig, **query: int) -> list[dict[str, Any]]:
    answer = await rig.http.get("/audit", headers=bearer("admin"), params=query)
    assert answer.status_code == 200
    found: list[dict[str, Any]] = answer.json()["audit"]
    return found


async def test_every_change_and_every_refusal_for_a_role_is_audited_and_nothing_else(rig: Rig) -> None:
    headers = bearer("operator") | {"X-Request-Id": "mine-7"}
    slept = (await rig.http.post("/sleep", headers=headers)).json()["id"]
    await rig.http.post("/models/chat/wake", headers=bearer("viewer"))
    await rig.http.post(f"/operations/{slept}/cancel", headers=bearer("operator"))
    await rig.http.post("/release_memory", headers=bearer("operator"), json={"tags": ["no"]})
    # These change nothing, or come from nobody.
    await rig.http.get("/models", headers=bearer("viewer"))
    await rig.http.post("/v1/completions", headers=bearer("inference"), json={"model": "chat", "prompt": "x"})
    await rig.http.post("/sleep")
    await rig.http.post("/sleep", headers={"Authorization": "Bearer nobody-has-this-one"})
    refused, cancelled, denied, sleep = await audit(rig)
    assert {name: sleep[name] for name in ("caller", "call", "model", "status", "code", "operation")} == {
        "caller": "operator-name",
        "call": "POST /sleep",
        "model": "chat",
        "status": 200,
        "code": "",
        "operation": slept,
    }
    assert (sleep["request"], sleep["address"]) == ("mine-7", "127.0.0.1")
    assert (denied["caller"], denied["call"]) == ("viewer-name", "POST /models/{model}/wake")
    assert (denied["status"], denied["code"]) == (403, "forbidden")
    assert (cancelled["operation"], cancelled["code"]) == (slept, "operation_finished")
    assert (cancelled["model"], cancelled["status"]) == ("chat", 409)
    assert (refused["call"], refused["code"]) == ("POST /release_memory", "unknown_tag")
    assert await audit(rig, limit=1) == [refused]
    assert str(tables.audit([sleep]))


async def test_ending_the_requests_of_others_is_audited_too(rig: Rig) -> None:
    await rig.http.post("/abort_request", headers=bearer("inference"), json={"abort_all": True})
    await rig.http.get("/flush_cache", headers=bearer("operator"))
    assert [entry["call"] for entry in await audit(rig)] == ["GET /flush_cache", "POST /abort_request"]


async def test_a_deletion_is_in_the_file_with_who_it_was_and_no_token_is(rig: Rig, tmp_path: Path) -> None:
    await rig.http.request("DELETE", "/models/chat", headers=bearer("admin"))
    with closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        (entry,) = entries(db, 10)
    assert (entry.caller, entry.call) == ("admin-name", "DELETE /models/{model}")
    assert (entry.model, entry.status) == ("chat", 200)
    assert not any(token in str(entry) for token in TOKENS.values())


async def test_without_tokens_changes_are_audited_too(tmp_path: Path) -> None:
    async with make_rig(tmp_path, {"chat": 1}) as made:
        await made.http.post("/sleep")
        (entry,) = (await made.http.get("/audit")).json()["audit"]
    assert (entry["caller"], entry["call"], entry["status"]) == ("local", "POST /sleep", 200)


def test_the_table_keeps_the_newest_entries_only() -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute(CREATE_AUDIT)
        for number in range(5):
            entry = AuditEntry(float(number), "lab", "", "POST /sleep", "", 200, "", f"op-{number}", "")
            add_entry(db, entry, kept=3)
        assert [entry.operation for entry in entries(db, 10)] == ["op-4", "op-3", "op-2"]


class _Slow:
    """A coordinator that takes its time to write, or is gone."""

    def __init__(self, gone: bool = False) -> None:
        self.gone = gone
        self.may_write = asyncio.Event()
        self.written: list[AuditEntry] = []

    async def models(self, detail: bool = False) -> list[Any]:
        raise ControlUnreachable("no coordinator")

    async def audit(self, entry: AuditEntry) -> None:
        if self.gone:
            raise ControlUnreachable("no coordinator")
        await self.may_write.wait()
        self.written.append(entry)


async def test_no_answer_goes_out_before_it_is_written_down(tmp_path: Path) -> None:
    control: Any = _Slow()
    app = app_over(control, MemoryInference(), config_of({"chat": 1}, tmp_path / "j"), io.StringIO())
    async with client_of(app) as http:
        asking = asyncio.create_task(http.post("/sleep"))
        await asyncio.wait({asking}, timeout=0.2)
        assert not asking.done()
        control.may_write.set()
        assert (await asking).status_code == 503
    assert [(entry.status, entry.code) for entry in control.written] == [(503, "coordinator_unreachable")]


async def test_what_cannot_be_written_down_is_logged_and_answered(tmp_path: Path) -> None:
    log, control = io.StringIO(), _Slow(gone=True)
    app = app_over(control, MemoryInference(), config_of({"chat": 1}, tmp_path / "j"), log)  # type: ignore[arg-type]
    async with client_of(app) as http:
        assert (await http.post("/sleep")).status_code == 503
    assert "a change is not in the journal's audit" in log.getvalue()
    assert '"call": "POST /sleep"' in log.getvalue()
