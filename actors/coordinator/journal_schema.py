"""The journal's tables."""

from __future__ import annotations

SCHEMA_VERSION = 1

SCHEMA = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    # body: the record that people see; request: what was asked; decided: from then on it only goes forward.
    "CREATE TABLE IF NOT EXISTS operations ("
    "seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, model TEXT NOT NULL, "
    "state TEXT NOT NULL, decided INTEGER NOT NULL DEFAULT 0, body TEXT NOT NULL, request TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS running ON operations (seq) WHERE state = 'running'",
    "CREATE TABLE IF NOT EXISTS keys ("
    "key TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, operation TEXT NOT NULL, created_at REAL NOT NULL)",
    "CREATE TABLE IF NOT EXISTS published (model TEXT PRIMARY KEY, body TEXT NOT NULL)",
    # body: the devices of the model's ranks
    "CREATE TABLE IF NOT EXISTS seats (model TEXT PRIMARY KEY, body TEXT NOT NULL)",
)
