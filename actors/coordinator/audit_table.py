"""The journal's table of who has changed what; bounded, the oldest go first."""

from __future__ import annotations

import sqlite3
from dataclasses import astuple, fields

from torpor.actors.audit import AuditEntry

KEPT_ENTRIES = 100_000
CREATE_AUDIT = (
    "CREATE TABLE audit (seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, caller TEXT NOT NULL, "
    "address TEXT NOT NULL, call TEXT NOT NULL, model TEXT NOT NULL, status INTEGER NOT NULL, code TEXT NOT NULL, "
    "operation TEXT NOT NULL, request TEXT NOT NULL)"
)
_COLUMNS = ", ".join(field.name for field in fields(AuditEntry))
_PLACES = ", ".join("?" for _ in fields(AuditEntry))


def add_entry(db: sqlite3.Connection, entry: AuditEntry, kept: int = KEPT_ENTRIES) -> None:
    """In a transaction of the caller's."""
    done = db.execute(f"INSERT INTO audit ({_COLUMNS}) VALUES ({_PLACES})", astuple(entry))
    db.execute("DELETE FROM audit WHERE seq <= ?", ((done.lastrowid or 0) - kept,))


def entries(db: sqlite3.Connection, limit: int) -> list[AuditEntry]:
    """Newest first."""
    rows = db.execute(f"SELECT {_COLUMNS} FROM audit ORDER BY seq DESC LIMIT ?", (limit,)).fetchall()
    return [AuditEntry(*row) for row in rows]
