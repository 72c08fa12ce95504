"""P9: what gate and front door cost a request, beside a bare FastAPI application that calls one Ray actor.

    PYTHONPATH=tests python tests/bench/p9_front_door.py --json FOLDER

1,000 requests at once, of 8 tokens each, are sent to `torpor serve --connect` over a rank with a toy engine that is as
fast as it can, and to the bare application (p9_rival.py); the two take turns. Seconds are from the first byte sent to
the last one read, as the client sees them, of each request of a round: p50 and p99 are the rounds' own. Whole answers
and streams are cases of their own. The CPU time of server and actor for each request is beside them: on a shared
machine it is what lasts. Both servers are processes with the same HTTP stack and log to files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ray
from p9_rival import ACTOR, TOKENS, Speaker
from record import Result

from torpor.actors.cluster import start_local
from torpor.actors.config import ClusterConfig, DeviceConfig, EngineConfig, HostPoolConfig, ModelConfig
from torpor.service.serve import bind

HERE = Path(__file__).parent
REQUESTS, ROUNDS, WARM_UP, PAUSE_S = 1000, 5, 100, 0.5
START_S = 60.0


class Door:
    """A server's process, where it listens, and what it is asked."""

    def __init__(self, name: str, command: list[str], log: Path, actor: int) -> None:
        self.name = name
        with bind("127.0.0.1", 0) as probe:
            self.port = int(probe.getsockname()[1])
        self._log = log.open("wb")
        self.process = subprocess.Popen([*command, str(self.port)], stdout=self._log, stderr=self._log)
        self.actor = actor  # the process behind it

    def cpu_s(self) -> tuple[float, float]:
        """CPU time so far: of the server, and of the actor."""
        return cpu_s(self.process.pid), cpu_s(self.actor)

    async def ask(self, stream: bool) -> float:
        """Seconds of one request."""
        body = json.dumps(
            {"model": "toy", "prompt": "go on", "max_tokens": TOKENS, "stream": stream}
        ).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-type: application/json\r\n"
        began_s = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        took_s = time.perf_counter() - began_s
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"x") >= TOKENS, answer
        return took_s

    async def until_it_answers(self) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                await self.ask(True)
                return
            except (OSError, AssertionError):
                assert self.process.poll() is None, f"{self.name} has ended; see its log"
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(0.2)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._log.close()


@contextlib.contextmanager
def doors(folder: Path) -> Iterator[tuple[Door, Door]]:
    """A Ray, a rank with its coordinator, the bare actor, and both servers."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), *sys.path]))
    engine = EngineConfig(kind="p9_rival:make_engine", max_running=1024, max_waiting=1024)
    cluster = start_local(
        ClusterConfig(
            models=(ModelConfig("toy", engine),),
            device=DeviceConfig("host", 1, 128 << 20),
            host_pool=HostPoolConfig(64 << 20),
            journal_path=str(folder / "journal.db"),
        )
    )
    made: list[Door] = []
    try:
        asyncio.run(cluster.wait_until_loaded(START_S))
        rank = asyncio.run(cluster.control.model("toy")).ranks[0].pid
        speaker = ray.remote(name=ACTOR, num_cpus=0, max_concurrency=2 * REQUESTS)(Speaker).remote()
        address = ray.get_runtime_context().gcs_address
        ours = [sys.executable, "-m", "torpor.service.cli", "serve", "--connect", address, "--port"]
        made.append(Door("torpor", ours, folder / "torpor.log", rank))
        rival = [sys.executable, str(HERE / "p9_rival.py"), address]
        made.append(Door("fastapi+ray", rival, folder / "rival.log", ray.get(speaker.pid.remote())))
        yield made[0], made[1]
        del speaker
    finally:
        for door in made:
            door.end()
        cluster.shutdown()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(result: Result, both: tuple[Door, Door], rounds: int, requests: int) -> None:
    for door in both:
        await door.until_it_answers()
        for stream in (False, True):
            await asyncio.gather(*(door.ask(stream) for _ in range(WARM_UP)))
    for stream in (False, True):
        case = f"{requests} at once, " + ("streams" if stream else "whole answers")
        for at in range(rounds):
            for door in both if at % 2 else reversed(both):
                await asyncio.sleep(PAUSE_S)
                before = door.cpu_s()
                seconds = sorted(await asyncio.gather(*(door.ask(stream) for _ in range(requests))))
                spent = [1e3 * (s - b) / requests for s, b in zip(door.cpu_s(), before, strict=True)]
                result.add(door.name, case, "server_cpu_ms", "ms", spent[0])
                result.add(door.name, case, "actor_cpu_ms", "ms", spent[1])
                result.add(door.name, case, "p50_s", "s", seconds[len(seconds) // 2])
                result.add(door.name, case, "p99_s", "s", seconds[len(seconds) * 99 // 100])


def ratios(result: Result) -> list[str]:
    medians = {(row["subject"], row["case"], row["metric"]): row["median"] for row in result.rows()}
    return [
        f"{case}, {metric}: {seconds / medians['fastapi+ray', case, metric]:.2f} of the rival's"
        for (subject, case, metric), seconds in medians.items()
        if subject == "torpor"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="folder for the result")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    options = parser.parse_args()
    result = Result(
        "P9",
        notes=f"subjects took turns; {TOKENS} tokens a request; a machine shared with other work: compare within a run",
    )
    with tempfile.TemporaryDirectory() as folder, doors(Path(folder)) as both:
        asyncio.run(measure(result, both, options.rounds, options.requests))
    print(result.table(), *ratios(result), sep="\n")
    options.json.mkdir(parents=True, exist_ok=True)
    print("kept in", result.save(options.json, "host"))


if __name__ == "__main__":
    main()
