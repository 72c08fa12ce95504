"""`serve` as a child process over an in-memory cluster: the real HTTP server, signals and exit codes, without Ray.

python service_child.py FOLDER PORT [--loading-fails] [--endless] [--refuses] [--slow-start] [--slow-end] [--joins]

TORPOR_SHUTDOWN of the environment is heeded.
The cluster is lost as soon as FOLDER/lost is there, which says why; with FOLDER/lost-only-here answers may end.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from service_fakes import MemoryInference
from service_rig import GIB, gate_of

from torpor.actors.config import ClusterConfig
from torpor.actors.coordinator.coordinator import Coordinator
from torpor.actors.coordinator.journal import Journal
from torpor.actors.coordinator.memory import Fault, MemoryCluster
from torpor.actors.ports import Loss
from torpor.service.cli.serve_command import say
from torpor.service.logs import make_logger
from torpor.service.serve import ServeError, Surroundings, serve
from torpor.service.settings.load import load_settings

LOADING_S = 0.3


class LateControl:
    """A Control whose coordinator begins to live with the first call, in the server's own event loop."""

    def __init__(
        self, config: ClusterConfig, cluster: MemoryCluster, fails: bool, waits_for: Path | None
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._fails = fails
        self._waits_for = waits_for  # loading ends when this file is there
        self._making: asyncio.Task[Coordinator] | None = None
        self._loading: asyncio.Task[None] | None = None

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            if self._making is None:
                self._making = asyncio.create_task(self._make())
            return await getattr(await self._making, name)(*arguments, **named)

        return call

    async def _make(self) -> Coordinator:
        journal = await Journal.open(self._config.journal_path)
        coordinator = Coordinator(self._config, journal, host_limit_bytes=8 * GIB)
        await coordinator.start()
        self._loading = asyncio.create_task(self._load(coordinator))
        return coordinator

    async def _load(self, coordinator: Coordinator) -> None:
        await asyncio.sleep(LOADING_S)
        while self._waits_for is not None and not self._waits_for.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for model in self._config.models:
            if self._fails:
                await coordinator.fail(model.name, "the checkpoint has no tensor 'lm_head'")
            else:
                await coordinator.attach(model.name, self._cluster.ranks[model.name])


class LateCluster:
    def __init__(self, config: ClusterConfig, flags: list[str]) -> None:
        self._cluster = MemoryCluster.build(config)
        self._slow_end = "--slow-end" in flags
        self._folder = Path(config.journal_path).parent
        if "--refuses" in flags:
            for ranks in self._cluster.ranks.values():
                ranks[0].fault("preflight", Fault.REFUSE, times=100)
        waits_for = self._folder / "load" if "--loads-on-word" in flags else None
        self.control = LateControl(config, self._cluster, "--loading-fails" in flags, waits_for)
        self.inference = MemoryInference(
            tuple(model.name for model in config.models),
            gate=lambda model: gate_of(self._cluster, model),
            endless="--endless" in flags,
            delay_s=0.02,
        )

    async def until_lost(self) -> Loss:
        while True:
            for name, serves_on in (("lost", False), ("lost-only-here", True)):
                if (self._folder / name).exists():
                    return Loss((self._folder / name).read_text(), serves_on)
            await asyncio.sleep(0.02)

    def shutdown(self) -> None:
        if self._slow_end:
            print("ending", flush=True)
            time.sleep(20)
        print(f"requests left: {len(self.inference.running)}", flush=True)


def main() -> int:
    folder, port, flags = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    model = folder / "model.gguf"
    model.write_bytes(b"GGUF")
    environment = {
        "TORPOR_MODELS": f'[{{"name": "chat", "engine": {{"model": "{model}"}}}}]',
        "TORPOR_HTTP__PORT": port,
        "TORPOR_JOURNAL__PATH": str(folder / "journal.db"),
    }
    environment |= {name: value for name, value in os.environ.items() if name == "TORPOR_SHUTDOWN"}
    if (folder / "tokens").exists():
        environment["TORPOR_AUTH__TOKENS_FILE"] = str(folder / "tokens")

    def start(config: ClusterConfig) -> LateCluster:
        if "--slow-start" in flags:
            print("starting", flush=True)
            time.sleep(2)
        config = replace(config, device=replace(config.device, host_capacity_bytes=GIB))
        return LateCluster(config, flags)

    around = Surroundings(start, say, make_logger(sys.stderr), cuda_device_count=lambda: 0)
    try:
        return serve(load_settings(None, environment), around, joins="--joins" in flags)
    except ServeError as error:
        print(f"torpor: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
