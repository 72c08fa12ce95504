"""Journals of earlier versions are brought forward, those of later ones are left alone; and none grows for ever."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_rig import SLEEP

from torpor.actors.config import EngineConfig, KvCacheConfig, ModelConfig, RecoverPolicy
from torpor.actors.coordinator import Journal, JournalError
from torpor.actors.coordinator.journal import KEY_LIFE_S
from torpor.actors.coordinator.journal_schema import SCHEMA_VERSION
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    Kind,
    Operation,
    OperationRequest,
    OperationState,
    RejectCode,
    RestoreMode,
)

# As the first version of this program has made them.
FIRST_TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS operations ("
    "seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, model TEXT NOT NULL, "
    "state TEXT NOT NULL, decided INTEGER NOT NULL DEFAULT 0, body TEXT NOT NULL, request TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS running ON operations (seq) WHERE state = 'running'",
    "CREATE TABLE IF NOT EXISTS keys ("
    "key TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, operation TEXT NOT NULL, created_at REAL NOT NULL)",
    "CREATE TABLE IF NOT EXISTS published (model TEXT PRIMARY KEY, body TEXT NOT NULL)",
    "INSERT INTO meta VALUES ('schema', '1'), ('id', 'the-first'), ('epoch', '41')",
)
FIRST_REQUEST = {
    "kind": "sleep",
    "model": "chat",
    "tags": None,
    "restore": {"weights": "cpu"},
    "drain": {"mode": "abort", "timeout_s": 3.0},
    "overflow": "reject",
    "verify": False,
    "dry_run": False,
    "on_conflict": "reject",
    "wake_on_request": False,
    "timeout_s": None,
    "idempotency_key": "me:1",
}
FIRST_OPERATION = {
    "id": "op-1",
    "kind": "sleep",
    "model": "chat",
    "state": "running",
    "tags": ["weights"],
    "restore": {"weights": "cpu"},
    "created_at": 5.0,
    "reason": None,
    "code": None,
    "needed_bytes": None,
    "free_bytes": None,
    "aborted_requests": 0,
    "prefix_tokens_lost": 0,
    "phases": [],
    "ranks": [],
    "finished_at": None,
    "dry_run": False,
}
FIRST_PUBLISHED = {
    "model": "chat",
    "tags": ["kv_cache", "weights"],
    "parked_tags": ["weights"],
    "undefined_tags": [],
    "hold": True,
    "generation": 7,
    "weights_version": 0,
    "failed": "",
}
SAME_REQUEST = OperationRequest(
    Kind.SLEEP,
    "chat",
    restore={"weights": RestoreMode.CPU},
    drain=DrainSpec(DrainMode.ABORT, 3.0),
    verify=False,  # as every coordinator asks, whose model is not configured otherwise
    idempotency_key="me:1",
)


def first_journal(path: Path) -> None:
    db = sqlite3.connect(path)
    for statement in FIRST_TABLES:
        db.execute(statement)
    asked = json.dumps(FIRST_REQUEST, sort_keys=True)
    db.execute(
        "INSERT INTO operations (id, model, state, decided, body, request) VALUES ('op-1', 'chat', 'running', 1, ?, ?)",
        (json.dumps(FIRST_OPERATION), asked),
    )
    plain = json.dumps(FIRST_REQUEST | {"idempotency_key": None}, sort_keys=True)
    db.execute(
        "INSERT INTO keys VALUES ('me:1', ?, 'op-1', 100.0)", (hashlib.sha256(plain.encode()).hexdigest(),)
    )
    db.execute("INSERT INTO published VALUES ('chat', ?)", (json.dumps(FIRST_PUBLISHED),))
    db.commit()
    db.close()


async def test_a_journal_of_the_first_version_is_brought_forward_with_all_that_it_knows(
    tmp_path: Path,
) -> None:
    """C5: also the keys that came before the upgrade."""
    path = tmp_path / "journal.db"
    first_journal(path)
    for _ in range(2):
        journal = await Journal.open(path)
        assert journal.id == "the-first"
        ((found, request, decided),) = await journal.unfinished()
        assert (found.id, found.kind, decided) == ("op-1", Kind.SLEEP, True)
        assert request == SAME_REQUEST
        published = (await journal.published())["chat"]
        assert (published.parked_tags, published.hold, published.generation) == (("weights",), True, 7)
        known = await journal.find_key(SAME_REQUEST, 101.0)
        assert known is not None and known.id == "op-1"
        assert await journal.models("a birth", [ModelConfig("chat")]) == [ModelConfig("chat")]
        await journal.close()
    journal = await Journal.open(path)
    assert await journal.next_epoch() == 42
    await journal.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() == (str(SCHEMA_VERSION),)
    db.close()


async def test_a_journal_of_a_later_version_is_refused_with_words_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    first_journal(path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    db.close()
    before = path.read_bytes()
    with pytest.raises(
        JournalError, match=f"has schema 99, this program knows {SCHEMA_VERSION}; use the program"
    ):
        await Journal.open(path)
    tables = {row[0] for row in sqlite3.connect(path).execute("SELECT name FROM sqlite_master")}
    assert "models" not in tables
    assert path.read_bytes()[100:] == before[100:], "beyond the header, which says that it has a log"


async def test_a_migration_that_is_cut_short_leaves_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torpor.actors.coordinator import journal_schema

    path = tmp_path / "journal.db"
    first_journal(path)
    cut = {**journal_schema.MIGRATIONS, 2: (*journal_schema.MIGRATIONS[2], "CREATE TABLE nonsense (")}
    monkeypatch.setattr(journal_schema, "MIGRATIONS", cut)
    with pytest.raises(JournalError):
        await Journal.open(path)
    monkeypatch.undo()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() == ("1",)
    db.close()
    journal = await Journal.open(path)
    assert len(await journal.unfinished()) == 1
    await journal.close()


async def test_models_are_the_configured_ones_for_a_new_service_and_the_changed_ones_for_the_same(
    tmp_path: Path,
) -> None:
    configured = [ModelConfig("chat", tensor_parallel=2), ModelConfig("solo")]
    rich = ModelConfig(
        "rich",
        EngineConfig(model="/a/b.gguf", seed=7),
        kv_cache=KvCacheConfig(gpu_bytes=5),
        restore_modes={"weights": RestoreMode.CPU},
        recover=RecoverPolicy.MANUAL,
    )
    journal = await Journal.open(tmp_path / "journal.db")
    assert await journal.models("one", configured) == configured
    await journal.add_model(rich)
    await journal.finish_deletion(Operation("op", Kind.DELETE, "solo", OperationState.SUCCEEDED, [], {}, 1.0))
    assert await journal.models("one", configured) == [configured[0], rich]
    assert await journal.models("another", configured) == configured
    await journal.close()


async def test_requests_that_are_refused_at_once_do_not_fill_the_journal(tmp_path: Path) -> None:
    """They never begin, and so never end: they are counted and forgotten all the same, keys after a day."""
    journal = await Journal.open(tmp_path / "journal.db", kept_operations=10)
    for number in range(500):
        refused = Operation(
            f"op-{number}", Kind.SLEEP, "chat", OperationState.REJECTED, [], {}, 1.0, code=RejectCode.CONFLICT
        )
        keyed = replace(SLEEP, idempotency_key=f"key-{number}")
        await journal.begin(refused, keyed, number * KEY_LIFE_S / 100)
    assert len(await journal.operations(None, 1000)) <= 10 + 200
    with sqlite3.connect(tmp_path / "journal.db") as db:
        assert db.execute("SELECT count(*) FROM keys").fetchone()[0] <= 200
    db.close()
    await journal.close()
