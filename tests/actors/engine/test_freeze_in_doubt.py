"""The coordinator dies over frozen requests: what the in-doubt table says, and they go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.engine_host import EngineHost, dummy_spec
from support.engine_rank import EngineRank, engine_rank

from torpor.actors.config import ClusterConfig
from torpor.actors.coordinator.coordinator import Coordinator
from torpor.actors.coordinator.journal import Journal
from torpor.actors.messages import (
    DrainMode,
    DrainSpec,
    Kind,
    ModelState,
    Operation,
    OperationRequest,
    OperationState,
    PhaseReply,
    RestoreMode,
)

PROMPT, TOKENS = list(range(3, 40)), 200
FREEZE = OperationRequest(
    Kind.SLEEP, "tiny", restore={"kv_cache": RestoreMode.PINNED}, drain=DrainSpec(DrainMode.FREEZE)
)
WAKE = OperationRequest(Kind.WAKE, "tiny")


class Silent:
    """A rank's port on which one phase is carried out, but its answer never comes."""

    def __init__(self, rank: EngineRank, phase: str) -> None:
        self.rank = 0
        self.done = asyncio.Event()
        self._core = rank.core
        self._phase = phase

    def __getattr__(self, name: str) -> Callable[..., Awaitable[PhaseReply]]:
        method: Callable[..., Awaitable[PhaseReply]] = getattr(self._core, name)
        if name != self._phase:
            return method

        async def mute(*arguments: object) -> PhaseReply:
            await method(*arguments)
            self.done.set()
            return await asyncio.Future()

        return mute


async def do(coordinator: Coordinator, request: OperationRequest) -> Operation:
    return await coordinator.wait((await coordinator.submit(request)).id, 30)


@pytest.mark.parametrize(
    ("phase", "ends_as", "state"),
    [
        ("drain", OperationState.REJECTED, ModelState.AWAKE),
        ("stage", OperationState.REJECTED, ModelState.AWAKE),
        ("commit", OperationState.SUCCEEDED, ModelState.ASLEEP),
        ("publish", OperationState.SUCCEEDED, ModelState.ASLEEP),
    ],
)
async def test_requests_go_on_when_the_coordinator_died_over_their_freeze(
    tiny: Path, tmp_path: Path, phase: str, ends_as: OperationState, state: ModelState
) -> None:
    """M6, G2: back before the decision, forward after it; nobody's tokens are lost."""
    spec = dummy_spec(tiny)
    config = ClusterConfig(models=(spec.model,), journal_path=str(tmp_path / "journal.db"))
    with EngineHost(spec) as host:
        expected = host.tell(PROMPT, max_tokens=TOKENS, temperature=0.8, seed=3).tokens
    async with engine_rank(spec) as rank:
        journal = await Journal.open(config.journal_path)
        await rank.ask("r", PROMPT, max_tokens=TOKENS, temperature=0.8, seed=3)
        await rank.until(lambda: len(rank.tokens("r")) >= 2)
        first = Coordinator(config, journal, host_limit_bytes=1 << 30)
        port = Silent(rank, phase)
        await first.attach("tiny", [port])  # type: ignore[list-item]
        await first.start()
        operation = await first.submit(FREEZE)
        await asyncio.wait_for(port.done.wait(), 30)
        await first.close()

        second = Coordinator(config, journal, host_limit_bytes=1 << 30)
        await second.attach("tiny", [rank.core])
        await second.start()
        assert (await second.wait(operation.id, 30)).state is ends_as
        assert second.published_state("tiny") is state
        if state is ModelState.ASLEEP:
            said = len(rank.tokens("r"))
            await asyncio.sleep(0.1)
            assert len(rank.tokens("r")) == said < TOKENS
            assert (await rank.core.status()).frozen_requests == 1
            assert (await do(second, WAKE)).state is OperationState.SUCCEEDED
        await rank.ended("r")
        assert rank.tokens("r") == expected
        assert (await do(second, FREEZE)).state is OperationState.SUCCEEDED
        await second.close()
        await journal.close()
