"""The journal's tables, version by version. A journal is brought forward when it is opened, never back."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from torpor.actors.coordinator.audit_table import CREATE_AUDIT

MIGRATIONS: Mapping[int, Sequence[str]] = {
    1: (
        "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        # body: the record that people see; request: what was asked; decided: from then on it only goes forward.
        "CREATE TABLE operations ("
        "seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, model TEXT NOT NULL, "
        "state TEXT NOT NULL, decided INTEGER NOT NULL DEFAULT 0, body TEXT NOT NULL, request TEXT NOT NULL)",
        "CREATE INDEX running ON operations (seq) WHERE state = 'running'",
        "CREATE TABLE keys ("
        "key TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, operation TEXT NOT NULL, created_at REAL NOT NULL)",
        "CREATE TABLE published (model TEXT PRIMARY KEY, body TEXT NOT NULL)",
        "INSERT INTO meta VALUES ('epoch', '0')",
    ),
    2: (
        # What there is to be: filled from the configuration when a service starts, changed while it runs.
        "CREATE TABLE models (seq INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, body TEXT NOT NULL)",
        # body: the devices of the model's ranks
        "CREATE TABLE IF NOT EXISTS seats (model TEXT PRIMARY KEY, body TEXT NOT NULL)",
        "CREATE INDEX keys_by_age ON keys (created_at)",
        "CREATE INDEX keys_by_operation ON keys (operation)",
    ),
    3: (CREATE_AUDIT,),
}
SCHEMA_VERSION = max(MIGRATIONS)


class NewerSchema(Exception):
    """The journal was written by a later version of this program."""

    def __init__(self, version: int) -> None:
        super().__init__(f"schema {version}")
        self.version = version


def migrate(db: sqlite3.Connection) -> None:
    """In a transaction of the caller's. Raises NewerSchema before anything is written."""
    version = _version(db)
    if version > SCHEMA_VERSION:
        raise NewerSchema(version)
    for number in range(version + 1, SCHEMA_VERSION + 1):
        for statement in MIGRATIONS[number]:
            db.execute(statement)
        db.execute("INSERT OR REPLACE INTO meta VALUES ('schema', ?)", (str(number),))


def _version(db: sqlite3.Connection) -> int:
    """0: nothing is there yet."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
        return 0
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    return int(row[0]) if row is not None else 0
