"""Who follows the changes of a cluster misses none, or is told so."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from pathlib import Path

import pytest
from coordinator_rig import SLEEP, Rig, asking

from torpor.actors.coordinator.feed import KEPT_CHANGES, snapshot
from torpor.actors.messages import Kind, ModelState, Operation, OperationState, Phase, PhaseRecord, RankRecord
from torpor.actors.news import Change, Position


async def follow(rig: Rig, after: Position | None, seen: list[Change]) -> None:
    while True:
        news = await rig.coordinator.changes(after, 10.0)
        seen.extend(news.changes)
        after = news.until


def test_every_change_is_told_once_in_order_as_it_was_then(rig: Rig) -> None:
    async def story() -> None:
        seen: list[Change] = []
        follower = asyncio.create_task(follow(rig, None, seen))
        await asyncio.sleep(0.1)
        for rank in rig.chat:
            rank.delay_s = {"stage": 1.0}
        await rig.do(SLEEP)
        await asyncio.sleep(0.1)
        states = [change.operation.state for change in seen if change.operation is not None]
        assert states[0] is OperationState.RUNNING and states[-1] is OperationState.SUCCEEDED
        models = [change.model.state for change in seen if change.model is not None]
        assert ModelState.SLEEPING in models and models[-1] is ModelState.ASLEEP
        sequences = [change.at.sequence for change in seen]
        assert sequences == list(range(sequences[0], sequences[0] + len(seen)))
        assert {change.at.epoch for change in seen} == {1}
        follower.cancel()

    rig.run(story)


def test_one_who_comes_back_hears_what_came_meanwhile_and_waits_for_more(rig: Rig) -> None:
    async def story() -> None:
        start = (await rig.coordinator.changes(None, 0.0)).until
        await rig.do(SLEEP)
        missed = await rig.coordinator.changes(start, 10.0)
        assert missed.changes and missed.changes[-1].at == missed.until
        middle = missed.changes[2].at
        assert (await rig.coordinator.changes(middle, 0.0)).changes == missed.changes[3:]
        began_s = rig.loop_time()
        assert (await rig.coordinator.changes(missed.until, 7.0)).changes == ()
        assert rig.loop_time() - began_s == pytest.approx(7.0), "nothing is asked in between"
        waiting = asyncio.create_task(rig.coordinator.changes(missed.until, 60.0))
        await asyncio.sleep(1.0)
        await rig.coordinator.submit(asking(Kind.WAKE))
        assert (await waiting).changes

    rig.run(story)


def test_a_position_that_is_too_old_or_of_a_coordinator_before_gets_a_reset(rig: Rig) -> None:
    async def story() -> None:
        feed = rig.coordinator.feed
        start = (await rig.coordinator.changes(None, 0.0)).until
        for _ in range(KEPT_CHANGES):
            feed.add(deleted="one")
        assert len((await rig.coordinator.changes(start, 0.0)).changes) == KEPT_CHANGES, "none is missing yet"
        feed.add(deleted="one")
        lost = await rig.coordinator.changes(start, 0.0)
        assert [change.reset for change in lost.changes] == [True] and lost.until == feed.position
        assert (await rig.coordinator.changes(lost.until, 0.0)).changes == ()
        await rig.restart()
        for stale in (lost.until, Position(rig.coordinator.epoch, 10**6)):
            (change,) = (await rig.coordinator.changes(stale, 0.0)).changes
            assert change.reset and change.at.epoch == rig.coordinator.epoch

    rig.run(story)


def test_the_end_of_a_model_is_told(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal.db")
    rig.with_maker()

    async def story() -> None:
        start = (await rig.coordinator.changes(None, 0.0)).until
        await rig.do(asking(Kind.DELETE, "solo"))
        changes = (await rig.coordinator.changes(start, 0.0)).changes
        assert changes[-1].deleted == "solo"
        assert not any(change.model and change.model.name == "chat" for change in changes)

    rig.run(story)


@pytest.mark.parametrize("text", ["", "7", "1:", ":1", "1:x", "-1:2", "1:2:3"])
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no event id, such as 3:17"):
        Position.parse(text)


def test_a_position_reads_as_it_was_written() -> None:
    assert Position.parse(str(Position(3, 17))) == Position(3, 17)


def test_a_change_stays_as_it_was_whatever_its_operation_becomes() -> None:
    """Of everything in a record that can change."""
    rank = RankRecord(0, residual={"weights": 1})
    operation = Operation(
        "op", Kind.SLEEP, "chat", OperationState.RUNNING, ["weights"], {"weights": "none"}, created_at=1.0
    )
    operation.phases, operation.ranks, operation.lost_bytes = (
        [PhaseRecord(Phase.DRAIN, 1.0)],
        [rank],
        {"a": 1},
    )
    kept, before = snapshot(operation), copy.deepcopy(operation)
    assert kept == before

    def change(thing: object) -> None:
        """Everything that can be changed in place, however deep."""
        for each in dataclasses.fields(thing):  # type: ignore[arg-type]
            value = getattr(thing, each.name)
            if isinstance(value, list):
                for one in [one for one in value if dataclasses.is_dataclass(one)]:
                    change(one)
                value.append("more")
            elif isinstance(value, dict):
                value["more"] = "more"
            else:
                setattr(thing, each.name, "other")

    change(operation)
    assert operation != before and kept == before
