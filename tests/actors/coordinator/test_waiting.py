"""Who waits for an operation is answered when all of it is over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from coordinator_rig import PATIENCE_S, Rig, asking

from torpor.actors.messages import Kind, Operation, OperationState


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
