"""The front door over a real coordinator and a real rank with its engine, all in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import httpx
from fastapi import FastAPI
from service_rig import app_over, client_of
from support.engine_host import dummy_spec, write_config
from support.engine_rank import EngineRank, engine_rank, keep_lease

from torpor.actors.config import ClusterConfig
from torpor.actors.coordinator.coordinator import Coordinator
from torpor.actors.coordinator.journal import Journal
from torpor.actors.messages import GenerateRequest, TokenEvent
from torpor.actors.ports import EndWaiting
from torpor.actors.ray.inbox import Inbox
from torpor.actors.ray.inference import raise_unless_admitted


class CoreInference:
    """An Inference over a rank in this process; it reads what the rank's own front end collects."""

    def __init__(self, rank: EngineRank) -> None:
        self._rank = rank

    async def abort_requests(self, model: str, request: str | None) -> int:
        return await self._rank.core.abort_requests("front", request)

    def on_abort(self, end: EndWaiting) -> None:
        """There is no other front end."""

    async def generate(self, model: str, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        front_end, inbox, ended = f"front-{request.id}", Inbox(), False

        async def pump() -> None:
            async with aclosing(self._rank.core.stream(front_end)) as batches:
                async for batch in batches:
                    for event in batch:
                        assert isinstance(event, TokenEvent)
                        inbox.put(event)

        (reply,) = await self._rank.core.submit(front_end, [request])
        raise_unless_admitted(reply)
        pumping = asyncio.create_task(pump())
        leasing = asyncio.create_task(keep_lease(self._rank.core, front_end))
        try:
            while not ended:
                event = await inbox.get(0.05) or TokenEvent(request.id)
                ended = event.finish_reason is not None
                yield event
        finally:
            leasing.cancel()
            await asyncio.gather(leasing, return_exceptions=True)
            await self._rank.core.detach(front_end)
            await pumping


@asynccontextmanager
async def real_rig(folder: Path) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient, EngineRank]]:
    """Its model is called chat."""
    spec = dummy_spec(write_config(folder))
    spec = replace(spec, model=replace(spec.model, name="chat"))
    config = ClusterConfig(models=(spec.model,), journal_path=str(folder / "journal.db"))
    async with engine_rank(spec) as rank:
        journal = await Journal.open(config.journal_path)
        coordinator = Coordinator(config, journal, host_limit_bytes=1 << 30)
        await coordinator.attach("chat", [rank.core])
        await coordinator.start()
        app = app_over(coordinator, CoreInference(rank), config, StringIO())  # type: ignore[arg-type]
        async with client_of(app) as http:
            yield app, http, rank
        await coordinator.close()
        await journal.close()
