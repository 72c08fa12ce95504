"""Subjects of a benchmark, each in its own process, that take turns on one device in the same minutes.

Only one of them has its memory at a time: before the next one's turn the driver must show the bytes free again.
"""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load import Load
from record import Result

ANSWER_S = 120.0
OURS = ("torpor", "limit")
GIVEN_BACK_S = 5.0
SLACK_BYTES = 256 << 20  # contexts grow a little
PROGRAM = Path(__file__).parent / "subjects.py"


class Failed(Exception):
    """A subject that did not do what it was told, in one line."""


@dataclass(frozen=True)
class Entry:
    """Who takes part. name: of its rows; program: of subjects.py; detail goes into the case of its rows."""

    name: str
    program: str
    load: Load
    detail: str = ""
    preload: str = ""

    def case(self, case: str) -> str:
        return f"{case}, {self.detail}" if self.detail else case

    def __str__(self) -> str:
        return f"{self.name}, {self.detail}" if self.detail else self.name


class Player:
    """One subject's process. `ask` raises Failed, with its last words."""

    def __init__(self, entry: Entry, program: Path = PROGRAM) -> None:
        self.entry = entry
        environment = dict(os.environ) | ({"LD_PRELOAD": entry.preload} if entry.preload else {})
        self.complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by end)
        self.process = subprocess.Popen(
            [sys.executable, str(program), entry.program, entry.load.text()],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            text=True,
        )

    def wait_until_started(self) -> None:
        self._answer("start")

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": what, **more}) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Failed(f"{self.entry}: {what}: {error}; {self._last_words()}") from None
        return self._answer(what)

    def seconds(self, what: str) -> float:
        return float(self.ask(what)["seconds"])

    def end(self) -> None:
        """Its memory is back with the driver when this returns."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.complaints.close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self, what: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            state = f"no answer within {ANSWER_S:g} s" if not ready else "its process ended"
            raise Failed(f"{self.entry}: {what}: {state}; {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(f"{self.entry}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self.complaints.seek(0)
        return " ".join(self.complaints.read()[-600:].split())


class Turns:
    """Who plays, whose memory is where, and what went wrong. free_bytes: the driver's word."""

    def __init__(self, result: Result, free_bytes: Callable[[], int], program: Path = PROGRAM) -> None:
        self.result = result
        self.free_bytes = free_bytes
        self.program = program
        self.players: list[Player] = []
        self.failures: list[str] = []
        self.base_bytes = 0

    @contextmanager
    def playing(self, entries: Sequence[Entry]) -> Iterator[None]:
        """All processes start together, without memory; whatever becomes of them, they end."""
        self.players = [Player(entry, self.program) for entry in entries]
        started = list(self.players)
        try:
            for player in started:
                with self.turn(player):
                    player.wait_until_started()
            self.base_bytes = self.free_bytes()
            yield
        finally:
            for player in started:
                player.end()

    @contextmanager
    def turn(self, player: Player) -> Iterator[None]:
        """One whose turn fails is told of, and takes no further part."""
        try:
            yield
        except Failed as failure:
            print(failure, flush=True)
            self.failures.append(str(failure))
            self.result.notes += f"; {failure}"
            if player in self.players:
                self.players.remove(player)
            player.end()

    def shuffled(self, seed: int) -> list[Player]:
        """Another order each round, so that nobody always follows the same one."""
        return random.Random(seed).sample(self.players, len(self.players))

    def load(self) -> None:
        """Each makes its memory and sleeps, one after the other; what contexts take is taken then."""
        for player in list(self.players):
            with self.turn(player):
                before = self.free_bytes()
                player.ask("load")
                taken = before - self.free_bytes()
                if taken < sum(player.entry.load.sizes()):
                    raise Failed(f"{player.entry}: load took {taken} bytes of the device")
                player.ask("sleep")
                self.base_bytes = min(self.base_bytes, self.free_bytes())
                if self.free_bytes() < before - player.entry.load.size_bytes // 2:
                    raise Failed(f"{player.entry}: did not give its memory back")

    def all_free(self, player: Player) -> None:
        """Failed unless the driver has the bytes again that were free before the player's turn."""
        deadline = time.monotonic() + GIVEN_BACK_S
        while (missing := self.base_bytes - self.free_bytes()) > SLACK_BYTES:
            if time.monotonic() > deadline:
                raise Failed(f"{player.entry}: {missing} bytes of the device were not given back")
            time.sleep(0.01)

    def add(self, entry: Entry, case: str, metric: str, seconds: float) -> None:
        self.result.add(entry.name, entry.case(case), metric, "s", seconds)

    def add_pair(self, entry: Entry, case: str, sleep_s: float, wake_s: float) -> None:
        for metric, seconds in (("sleep_s", sleep_s), ("wake_s", wake_s), ("pair_s", sleep_s + wake_s)):
            self.add(entry, case, metric, seconds)

    def conclude(self, folder: Path, machine_name: str) -> int:
        """Failures first, then the figures; the status is 1 where a subject of ours has failed."""
        for failure in self.failures:
            print("FAILED", failure)
        path = self.result.save(folder, machine_name)
        print(self.result.table())
        print("kept in", path)
        return int(any(failure.startswith(OURS) for failure in self.failures))
