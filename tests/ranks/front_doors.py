"""Front ends of a Torpor: one with patience, and one over HTTP in this process."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from ranks.torpors import Torpor
from torpor.service.app import create_app
from torpor.service.gate.gates import Gates
from torpor.service.gate.patience import PatientInference
from torpor.service.logs import make_logger
from torpor.service.serve import bind


class NoCounts:
    def count_waiting(self, model: str, change: int) -> None: ...

    def observe_wait(self, model: str, seconds: float) -> None: ...


def patient(torpor: Torpor) -> PatientInference:
    gates = Gates(torpor.config, torpor.control)
    return PatientInference(torpor.new_front_end(), torpor.control, gates, NoCounts())


@asynccontextmanager
async def served(torpor: Torpor) -> AsyncIterator[str]:
    """Its URL."""
    gates = Gates(torpor.config, torpor.control)
    logger = make_logger(io.StringIO())
    app = create_app(torpor.control, torpor.new_front_end(), logger=logger, gates=gates)
    with bind("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            await app.state.context.inference.close()
            server.should_exit = True
            await serving
