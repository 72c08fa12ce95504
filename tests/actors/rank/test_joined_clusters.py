"""When a front end that has joined a cluster has to start anew: its head is silent for long, or its raylet is dead."""

from __future__ import annotations

import asyncio
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.processes import command_of

from torpor.actors import cluster
from torpor.actors.cluster import joined_is_lost
from torpor.actors.ports import Loss
from torpor.actors.ray.raylet import Raylet, raylet_of

KNOCK_S = 0.02
PATIENCE_S = 0.5


class Head:
    """In the place of a RayControl."""

    def __init__(self) -> None:
        self.there = True
        self.asked = 0

    async def head_answers(self) -> bool:
        self.asked += 1
        return self.there


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Head:
    monkeypatch.setattr(cluster, "KNOCK_S", KNOCK_S)
    return Head()


@pytest.fixture
def node() -> str:
    return secrets.token_hex(28)


@pytest.fixture
def process(node: str) -> Iterator[subprocess.Popen[bytes]]:
    """One that looks like a raylet from outside."""
    words = ["/somewhere/raylet", "-c", "import time; time.sleep(60)", f"--node_id={node}", "--port=1"]
    with subprocess.Popen(words, executable=sys.executable) as started:
        while not command_of(started.pid):  # the kernel shows it a moment later
            time.sleep(0.01)
        yield started
        started.kill()


def raylet(node: str) -> Raylet:
    found = raylet_of(node)
    assert found is not None
    return found


def lost(head: Head, raylet: Raylet | None) -> asyncio.Task[Loss]:
    return asyncio.create_task(joined_is_lost(head, raylet, PATIENCE_S))  # type: ignore[arg-type]


async def test_while_head_and_raylet_are_there_nothing_is_lost(
    head: Head, node: str, process: subprocess.Popen[bytes]
) -> None:
    waiting = lost(head, raylet(node))
    await asyncio.sleep(2 * PATIENCE_S)
    assert not waiting.done()
    waiting.cancel()


async def test_a_dead_raylet_ends_a_front_end_in_order(
    head: Head, node: str, process: subprocess.Popen[bytes]
) -> None:
    """It would not be ready ever again. The raylet is a zombie here, as where nobody waits for it in a container."""
    waiting = lost(head, raylet(node))
    await asyncio.sleep(3 * KNOCK_S)
    process.send_signal(signal.SIGKILL)
    loss = await asyncio.wait_for(waiting, 2)
    assert loss.serves_on
    assert "the raylet by which this front end was in Ray's cluster has died" in loss.why


async def test_without_its_raylet_it_serves_on_until_the_head_is_back(head: Head) -> None:
    """Nobody could start another front end meanwhile."""
    head.there = False
    waiting = lost(head, None)
    await asyncio.sleep(PATIENCE_S / 2)
    assert head.asked > 1 and not waiting.done()
    head.there = True
    assert (await asyncio.wait_for(waiting, 2)).serves_on


async def test_a_head_that_is_silent_for_too_long_ends_it_at_once(
    head: Head, node: str, process: subprocess.Popen[bytes]
) -> None:
    waiting = lost(head, raylet(node))
    await asyncio.sleep(3 * KNOCK_S)
    head.there = False
    loss = await asyncio.wait_for(waiting, 5)
    assert loss == Loss(
        "Ray's head has not answered for 0.5 s; see to it that it runs, and start this front end again."
    )


def test_a_raylet_is_found_by_its_node_alone(node: str, process: subprocess.Popen[bytes]) -> None:
    assert raylet(node).pid == process.pid
    assert raylet(node).lives
    assert raylet_of(node[:-1]) is None
    assert raylet_of(secrets.token_hex(28)) is None


def test_another_process_with_its_number_is_not_taken_for_it(
    node: str, process: subprocess.Popen[bytes]
) -> None:
    assert not replace(raylet(node), began="1").lives
