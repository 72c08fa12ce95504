"""What is on the disk, when, and for how long."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_rig import SLEEP, Rig

from torpor.actors.coordinator import Journal, JournalError
from torpor.actors.coordinator.journal import KEY_LIFE_S
from torpor.actors.coordinator.records import Published
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    Hold,
    Kind,
    OnConflict,
    OnExpiry,
    Operation,
    OperationRequest,
    OperationState,
    Phase,
    PhaseRecord,
    RankOutcome,
    RankRecord,
    RejectCode,
    RestoreMode,
)
from torpor.actors.ports import ControlUnreachable, KeyReused

REQUEST = OperationRequest(
    Kind.SLEEP,
    "chat",
    tags=("weights",),
    restore={"weights": RestoreMode.CPU},
    drain=DrainSpec(DrainMode.ABORT, 3.0),
    on_conflict=OnConflict.WAIT,
    timeout_s=9.0,
    idempotency_key="me:key",
)


def operation(name: str = "op-1", state: OperationState = OperationState.RUNNING) -> Operation:
    return Operation(
        name,
        Kind.SLEEP,
        "chat",
        state,
        ["weights"],
        {"weights": "cpu"},
        created_at=5.0,
        reason="why",
        code=RejectCode.REFUSED,
        phases=[PhaseRecord(Phase.STAGE, 1.0, 2.0, 3)],
        ranks=[RankRecord(0, "n", "d", RankOutcome.COMMITTED, None, 7, 8, {"context": 9})],
    )


async def test_what_is_written_is_read_back_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = await Journal.open(path)
    identity = journal.id
    assert [await journal.next_epoch(), await journal.next_epoch()] == [1, 2]
    await journal.begin(operation(), REQUEST, 5.0)
    await journal.begin(operation("op-2"), replace(REQUEST, idempotency_key=None), 5.0)
    await journal.decide("op-2")
    published = Published(
        "chat",
        ("kv", "weights"),
        ("kv",),
        (),
        holds=(Hold("op-1", "me", 5.0, 9.0, OnExpiry.WAKE, 14.0),),
        generation=4,
        weights_version=2,
    )
    await journal.publish(published)
    await journal.close()

    journal = await Journal.open(path)
    assert journal.id == identity and await journal.next_epoch() == 3
    assert await journal.unfinished() == [
        (operation(), REQUEST, False),
        (operation("op-2"), replace(REQUEST, idempotency_key=None), True),
    ]
    assert await journal.published() == {"chat": published}
    done = operation(state=OperationState.SUCCEEDED)
    await journal.finish(done, replace(published, generation=5))
    assert await journal.operation("op-1") == done
    assert [found.id for found in await journal.operations("chat", 10)] == ["op-2", "op-1"]
    assert await journal.operations("another", 10) == []
    assert (await journal.published())["chat"].generation == 5
    await journal.close()


async def test_nobody_else_may_read_who_did_what(tmp_path: Path) -> None:
    """Nor where an earlier version, or a backup, has left it open to all."""
    path = tmp_path / "journal.db"
    path.touch(mode=0o644)
    journal = await Journal.open(path)
    await journal.begin(operation(), REQUEST, 5.0)
    modes = {found.name: found.stat().st_mode & 0o777 for found in os.scandir(tmp_path)}
    assert "journal.db-wal" in modes and set(modes.values()) == {0o600}, modes
    await journal.close()


async def test_a_decision_is_on_the_disk_when_it_has_been_awaited(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "journal.db")
    await journal.begin(operation(), REQUEST, 5.0)
    reader = sqlite3.connect(tmp_path / "journal.db")
    try:
        assert reader.execute("SELECT decided FROM operations").fetchall() == [(0,)]
        await journal.decide("op-1")
        assert reader.execute("SELECT decided FROM operations").fetchall() == [(1,)]
    finally:
        reader.close()
    with pytest.raises(JournalError, match="op-9 is not in journal"):
        await journal.decide("op-9")
    assert await asyncio.to_thread(_pragma, journal, "synchronous") == 2, "FULL"
    assert await asyncio.to_thread(_pragma, journal, "journal_mode") == "wal"
    await journal.close()


def _pragma(journal: Journal, name: str) -> object:
    """As the writer's own connection has it."""
    connection = journal._connection
    assert connection is not None
    return journal._writer.submit(lambda: connection.execute(f"PRAGMA {name}").fetchone()[0]).result()


def test_the_decision_is_in_the_file_before_any_rank_is_told_to_commit(rig: Rig) -> None:
    async def story() -> None:
        seen: list[tuple[int, int]] = []

        def look(moment: str, method: str, rank: object) -> None:
            if (moment, method) == ("before", "commit"):
                reader = sqlite3.connect(rig.journal_path)
                seen.extend(reader.execute("SELECT decided, 1 FROM operations WHERE id = 'op-1'").fetchall())
                reader.close()

        for rank in rig.chat:
            rank.on_call = look
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED
        assert seen == [(1, 1)] * 3

    rig.run(story)


def test_a_decision_that_cannot_be_written_aborts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        before = rig.free_bytes()

        async def full(operation_id: str) -> None:
            raise JournalError("no room on the disk")

        monkeypatch.setattr(rig.journal, "decide", full)
        outcome = await rig.do(SLEEP)
        assert outcome.state is OperationState.REJECTED and "no room on the disk" in (outcome.reason or "")
        rig.assert_untouched(before)
        monkeypatch.undo()
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED

    rig.run(story)


def test_nothing_is_begun_that_cannot_be_written(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        before = rig.free_bytes()

        async def full(*_: object) -> None:
            raise JournalError("no room on the disk")

        monkeypatch.setattr(rig.journal, "begin", full)
        with pytest.raises(ControlUnreachable, match="no room on the disk"):
            await rig.coordinator.submit(SLEEP)
        assert not {"preflight", "drain"} & {call for rank in rig.chat for call in rank.calls}
        rig.assert_untouched(before)
        monkeypatch.undo()
        assert (await rig.do(SLEEP)).state is OperationState.SUCCEEDED

    rig.run(story)


async def test_a_key_stands_for_its_operation_for_a_day(tmp_path: Path) -> None:
    """C5."""
    journal = await Journal.open(tmp_path / "journal.db")
    await journal.begin(operation(), REQUEST, 100.0)
    assert await journal.find_key(REQUEST, 101.0) == operation()
    with pytest.raises(KeyReused):
        await journal.find_key(replace(REQUEST, tags=None), 101.0)
    await journal.finish(operation(state=OperationState.SUCCEEDED), None)
    assert await journal.find_key(REQUEST, 100.0 + KEY_LIFE_S - 1) == operation(
        state=OperationState.SUCCEEDED
    )
    assert await journal.find_key(REQUEST, 100.0 + KEY_LIFE_S) is None
    await journal.finish(operation(state=OperationState.REJECTED), None)
    assert await journal.find_key(REQUEST, 104.0) is None, "after a rejection it starts anew"
    await journal.close()


async def test_old_finished_operations_are_forgotten_and_running_ones_never(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "journal.db", kept_operations=10)
    request = replace(REQUEST, idempotency_key=None)
    await journal.begin(operation("op-running"), request, 1.0)
    for number in range(150):
        await journal.begin(operation(f"op-{number}"), request, 1.0)
        await journal.finish(operation(f"op-{number}", OperationState.SUCCEEDED), None)
    assert await journal.operation("op-0") is None
    assert await journal.operation("op-149") is not None
    assert [found.id for found, _, _ in await journal.unfinished()] == ["op-running"]
    assert len(await journal.operations(None, 1000)) <= 10 + 100
    await journal.close()


async def test_a_second_coordinator_on_the_same_journal_is_told_so(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "journal.db")
    with pytest.raises(JournalError, match="another coordinator uses it; stop that one"):
        await Journal.open(tmp_path / "journal.db")
    await journal.close()
    await (await Journal.open(tmp_path / "journal.db")).close()


@pytest.mark.parametrize("content", [b"this is no database, and long enough to look like one" * 50])
async def test_a_file_that_is_no_journal_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=r"journal\.db is not readable; move it away"):
        await Journal.open(path)
    assert path.read_bytes() == content


async def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    await (await Journal.open(path)).close()
    other = sqlite3.connect(path)
    other.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    other.commit()
    other.close()
    with pytest.raises(JournalError, match="has schema 99, this program knows 3"):
        await Journal.open(path)


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(JournalError, match="name another path"):
        await Journal.open(tmp_path / "file" / "journal.db")
