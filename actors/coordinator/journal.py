"""The coordinator's memory that outlives it: one SQLite file, written through by one thread of its own.

WAL with synchronous=FULL: what an awaited call has written is on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import sqlite3
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from torpor.actors.audit import AuditEntry
from torpor.actors.config import ModelConfig
from torpor.actors.coordinator.audit_table import add_entry, entries
from torpor.actors.coordinator.journal_schema import SCHEMA_VERSION, NewerSchema, migrate
from torpor.actors.coordinator.records import (
    Published,
    fingerprint,
    model_from_json,
    model_to_json,
    operation_from_json,
    operation_to_json,
    published_from_json,
    published_to_json,
    request_from_json,
    request_to_json,
)
from torpor.actors.messages import Operation, OperationRequest, OperationState
from torpor.actors.ports import ControlUnreachable, KeyReused
from torpor.actors.seats import Seat

P = ParamSpec("P")
T = TypeVar("T")
KEY_LIFE_S = 24 * 3600.0
KEPT_OPERATIONS = 10_000  # finished ones; older are forgotten
_PRUNE_EVERY = 100
_WAL_BYTES = 4 << 20  # what is left of the log after its contents went to the file


class JournalError(ControlUnreachable):
    """The journal cannot be used, and no operation is taken without it; the message says what to do."""


class Journal:
    """Open it with `await Journal.open(path)`. Every method waits for the disk."""

    def __init__(self, path: Path, kept_operations: int = KEPT_OPERATIONS) -> None:
        self.path = path.expanduser()
        self.id = ""
        self._kept_operations = kept_operations
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._connection: sqlite3.Connection | None = None
        self._lock_fd: int | None = None
        self._begun = 0

    @staticmethod
    async def open(path: str | Path, kept_operations: int = KEPT_OPERATIONS) -> Journal:
        """Raises JournalError."""
        journal = Journal(Path(path), kept_operations)
        try:
            await journal._run(Journal._open)
        except BaseException:
            await journal.close()
            raise
        return journal

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._close)
        self._writer.shutdown(wait=False)

    async def next_epoch(self, above: int = 0) -> int:
        """Higher than that of every start before, and than `above`; it is on the disk when this returns."""
        return await self._run(Journal._next_epoch, above)

    async def begin(self, operation: Operation, request: OperationRequest, now: float) -> None:
        """The operation, and its idempotency key with it."""
        await self._run(Journal._begin, operation_to_json(operation), operation, request, now)

    async def bind_key(self, request: OperationRequest, operation_id: str, now: float) -> None:
        """The request's key, if it has one, stands for this operation too."""
        if request.idempotency_key is not None:
            await self._run(Journal._put_key, request, operation_id, now)

    async def find_key(self, request: OperationRequest, now: float) -> Operation | None:
        """The operation that this key stands for, if any. Raises KeyReused when it came with another body."""
        return await self._run(Journal._find_key, request, now)

    async def decide(self, operation_id: str) -> None:
        """After this, and only after, ranks may be told to commit."""
        await self._run(Journal._decide, operation_id)

    async def finish(self, operation: Operation, published: Published | None) -> None:
        """The outcome and what is published with it, in one transaction."""
        await self._run(Journal._finish, operation_to_json(operation), operation, published)

    async def models(self, birth: str, configured: Sequence[ModelConfig]) -> list[ModelConfig]:
        """What there is to be. For a service that was not here before (another birth): as configured."""
        return await self._run(Journal._models, birth, configured)

    async def add_model(self, model: ModelConfig) -> None:
        """There is to be this one too, or as this says."""
        await self._run(Journal._add_model, model)

    async def finish_deletion(self, operation: Operation) -> None:
        """The outcome of a delete; nothing but its operations is left of the model."""
        await self._run(Journal._finish_deletion, operation_to_json(operation), operation)

    async def publish(self, published: Published) -> None:
        await self._run(Journal._publish, published)

    async def published(self) -> dict[str, Published]:
        return await self._run(Journal._published)

    async def seats(self) -> dict[str, tuple[Seat, ...]]:
        return await self._run(Journal._seats)

    async def write_seats(self, seats: Mapping[str, tuple[Seat, ...]]) -> None:
        """All of them, in place of those before."""
        await self._run(Journal._write_seats, dict(seats))

    async def unfinished(self) -> list[tuple[Operation, OperationRequest, bool]]:
        """(operation, request, decided), oldest first."""
        return await self._run(Journal._unfinished)

    async def is_decided(self, operation_id: str) -> bool:
        return await self._run(Journal._is_decided, operation_id)

    async def operation(self, operation_id: str) -> Operation | None:
        return await self._run(Journal._operation, operation_id)

    async def operations(self, model: str | None, limit: int) -> list[Operation]:
        """Newest first."""
        return await self._run(Journal._operations, model, limit)

    async def audit(self, entry: AuditEntry) -> None:
        await self._run(Journal._audit, entry)

    async def audits(self, limit: int) -> list[AuditEntry]:
        """Newest first."""
        return await self._run(lambda journal: entries(journal._db, limit))

    async def _run(self, work: Callable[Concatenate[Journal, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        def guarded() -> T:
            try:
                return work(self, *args, **kwargs)
            except sqlite3.Error as error:
                raise JournalError(self._advice(error)) from error

        return await asyncio.get_running_loop().run_in_executor(self._writer, guarded)

    def _advice(self, error: sqlite3.Error) -> str:
        text = str(error)
        if "locked" in text or "busy" in text:
            return f"journal {self.path} is locked by another process; end it, then try again ({text})"
        if "not a database" in text or "malformed" in text:
            return f"journal {self.path} is not readable; move it away and start without its history ({text})"
        if "full" in text:
            return f"no room on the disk of journal {self.path}; make some ({text})"
        return f"journal {self.path}: {text}; check that its folder exists and can be written"

    # --- on the writer's thread ---

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            raise JournalError(f"journal {self.path} is closed")
        return self._connection

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It says who did what: nobody else's to read. What SQLite makes beside it has the same mode.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with contextlib.suppress(PermissionError):  # somebody else's, who lets us write it
                self.path.chmod(0o600)
        except BlockingIOError as error:
            advice = "another coordinator uses it; stop that one, or name another path"
            raise JournalError(f"journal {self.path} is locked: {advice}") from error
        except OSError as error:
            raise JournalError(
                f"journal {self.path} cannot be made: {error.strerror}; name another path"
            ) from error
        self._connection = sqlite3.connect(self.path, timeout=5.0, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(f"PRAGMA journal_size_limit={_WAL_BYTES}")
        try:
            with _Transaction(self._db):
                migrate(self._db)
                self._db.execute("INSERT OR IGNORE INTO meta VALUES ('id', ?)", (uuid.uuid4().hex,))
        except NewerSchema as error:
            raise JournalError(
                f"journal {self.path} has schema {error.version}, this program knows {SCHEMA_VERSION}; "
                "use the program that wrote it, or move the file away"
            ) from error
        self.id = self._meta("id")

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _meta(self, key: str) -> str:
        return str(self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])

    def _next_epoch(self, above: int) -> int:
        with _Transaction(self._db):
            epoch = max(int(self._meta("epoch")), above) + 1
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'epoch'", (str(epoch),))
        return epoch

    def _begin(self, body: str, operation: Operation, request: OperationRequest, now: float) -> None:
        with _Transaction(self._db):
            self._db.execute(
                "INSERT INTO operations (id, model, state, body, request) VALUES (?, ?, ?, ?, ?)",
                (operation.id, operation.model, operation.state.value, body, request_to_json(request)),
            )
            self._put_key(request, operation.id, now)
            # Here, since what is refused at once has no other end.
            self._begun += 1
            if self._begun % _PRUNE_EVERY == 1:
                self._prune(now)

    def _put_key(self, request: OperationRequest, operation_id: str, now: float) -> None:
        if request.idempotency_key is not None:
            self._db.execute(
                "INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?)",
                (request.idempotency_key, fingerprint(request), operation_id, now),
            )

    def _find_key(self, request: OperationRequest, now: float) -> Operation | None:
        row = self._db.execute(
            "SELECT fingerprint, operation FROM keys WHERE key = ? AND created_at > ?",
            (request.idempotency_key, now - KEY_LIFE_S),
        ).fetchone()
        if row is None:
            return None
        if row[0] != fingerprint(request):
            raise KeyReused(
                "this idempotency key came with another request before; use a new key for a new request"
            )
        operation = self._operation(row[1])
        return None if operation is None or operation.state is OperationState.REJECTED else operation

    def _decide(self, operation_id: str) -> None:
        with _Transaction(self._db):
            done = self._db.execute(
                "UPDATE operations SET decided = 1 WHERE id = ?", (operation_id,)
            ).rowcount
            if done != 1:
                raise JournalError(f"operation {operation_id} is not in journal {self.path}")

    def _models(self, birth: str, configured: Sequence[ModelConfig]) -> list[ModelConfig]:
        with _Transaction(self._db):
            row = self._db.execute("SELECT value FROM meta WHERE key = 'birth'").fetchone()
            if row is None or row[0] != birth:
                self._db.execute("DELETE FROM models")
                for model in configured:
                    self._put_model(model)
                self._db.execute("INSERT OR REPLACE INTO meta VALUES ('birth', ?)", (birth,))
            rows = self._db.execute("SELECT body FROM models ORDER BY seq").fetchall()
        return [model_from_json(body) for (body,) in rows]

    def _add_model(self, model: ModelConfig) -> None:
        with _Transaction(self._db):
            self._put_model(model)

    def _put_model(self, model: ModelConfig) -> None:
        self._db.execute(
            "INSERT INTO models (name, body) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET body = excluded.body",
            (model.name, model_to_json(model)),
        )

    def _finish_deletion(self, body: str, operation: Operation) -> None:
        with _Transaction(self._db):
            self._put_outcome(body, operation)
            self._db.execute("DELETE FROM models WHERE name = ?", (operation.model,))
            self._db.execute("DELETE FROM published WHERE model = ?", (operation.model,))

    def _finish(self, body: str, operation: Operation, published: Published | None) -> None:
        with _Transaction(self._db):
            self._put_outcome(body, operation)
            if published is not None:
                self._put_published(published)

    def _put_outcome(self, body: str, operation: Operation) -> None:
        self._db.execute(
            "UPDATE operations SET state = ?, body = ? WHERE id = ?",
            (operation.state.value, body, operation.id),
        )

    def _prune(self, now: float) -> None:
        self._db.execute("DELETE FROM keys WHERE created_at <= ?", (now - KEY_LIFE_S,))
        self._db.execute(
            "DELETE FROM operations WHERE state != 'running' AND id NOT IN (SELECT operation FROM keys) "
            "AND seq <= (SELECT max(seq) FROM operations) - ?",
            (self._kept_operations,),
        )

    def _put_published(self, published: Published) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO published VALUES (?, ?)", (published.model, published_to_json(published))
        )

    def _publish(self, published: Published) -> None:
        with _Transaction(self._db):
            self._put_published(published)

    def _published(self) -> dict[str, Published]:
        rows = self._db.execute("SELECT model, body FROM published").fetchall()
        return {model: published_from_json(body) for model, body in rows}

    def _seats(self) -> dict[str, tuple[Seat, ...]]:
        rows = self._db.execute("SELECT model, body FROM seats").fetchall()
        return {model: tuple(Seat(**one) for one in json.loads(body)) for model, body in rows}

    def _write_seats(self, seats: Mapping[str, tuple[Seat, ...]]) -> None:
        with _Transaction(self._db):
            self._db.execute("DELETE FROM seats")
            rows = [(model, json.dumps([asdict(seat) for seat in each])) for model, each in seats.items()]
            self._db.executemany("INSERT INTO seats VALUES (?, ?)", rows)

    def _unfinished(self) -> list[tuple[Operation, OperationRequest, bool]]:
        rows = self._db.execute(
            "SELECT body, request, decided FROM operations WHERE state = 'running' ORDER BY seq"
        ).fetchall()
        return [
            (operation_from_json(body), request_from_json(asked), bool(done)) for body, asked, done in rows
        ]

    def _is_decided(self, operation_id: str) -> bool:
        row = self._db.execute("SELECT decided FROM operations WHERE id = ?", (operation_id,)).fetchone()
        return row is not None and bool(row[0])

    def _operation(self, operation_id: str) -> Operation | None:
        row = self._db.execute("SELECT body FROM operations WHERE id = ?", (operation_id,)).fetchone()
        return None if row is None else operation_from_json(row[0])

    def _audit(self, entry: AuditEntry) -> None:
        with _Transaction(self._db):
            add_entry(self._db, entry)

    def _operations(self, model: str | None, limit: int) -> list[Operation]:
        rows = self._db.execute(
            "SELECT body FROM operations WHERE ? IS NULL OR model = ? ORDER BY seq DESC LIMIT ?",
            (model, model, limit),
        ).fetchall()
        return [operation_from_json(row[0]) for row in rows]


class _Transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK on a throw."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            try:
                self._db.execute("COMMIT")
                return
            except sqlite3.Error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
