"""Who waits for an operation is answered when all of it is over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from coordinator_rig import PATIENCE_S, SLEEP, Rig, asking

from torpor.actors.messages import Kind, OnConflict, Operation, OperationState, RejectCode


def test_a_deleted_model_is_gone_when_its_deletion_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name can be taken at once, also where the disk is slow."""
    rig = Rig(tmp_path / "journal.db")
    rig.with_maker()

    async def story() -> None:
        really = rig.journal.finish_deletion

        async def slowly(operation: Operation) -> None:
            await asyncio.sleep(5)
            await really(operation)

        monkeypatch.setattr(rig.journal, "finish_deletion", slowly)
        begun = await rig.coordinator.submit(asking(Kind.DELETE))
        await asyncio.sleep(1)  # the ranks are gone
        assert "chat" not in rig.cluster.ranks
        assert (await rig.coordinator.wait(begun.id, PATIENCE_S)).state is OperationState.SUCCEEDED
        assert [view.name for view in await rig.coordinator.models()] == ["solo"]

    rig.run(story)


def test_what_has_waited_is_refused_where_the_model_has_changed_since_its_caller_looked(rig: Rig) -> None:
    """C4: looked at before its turn, the generation was the one named; the operation before it has changed it."""

    async def story() -> None:
        looked = (await rig.coordinator.model("chat")).generation
        await rig.coordinator.submit(SLEEP)
        fields = {"on_conflict": OnConflict.WAIT, "generation": looked}
        waiting = await rig.coordinator.submit(asking(Kind.WAKE, **fields))
        assert waiting.state is OperationState.RUNNING
        ended = await rig.coordinator.wait(waiting.id, PATIENCE_S)
        assert (ended.state, ended.code) == (OperationState.REJECTED, RejectCode.GENERATION)
        now = await rig.coordinator.model("chat")
        assert now.parked_tags == list(now.tags)
        woken = await rig.coordinator.submit(asking(Kind.WAKE, generation=now.generation))
        assert (await rig.coordinator.wait(woken.id, PATIENCE_S)).state is OperationState.SUCCEEDED

    rig.run(story)
