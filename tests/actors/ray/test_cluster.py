"""Finding a cluster from another process, and leaving it as it was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import ray
from ranks.torpors import MakeTorpor, read, request

from torpor.actors.cluster import NoCluster, connect, journal_node
from torpor.actors.messages import GateReason, ModelState
from torpor.actors.ray import knocking

CLIENT = """
import asyncio, sys
from torpor.actors.cluster import connect
from torpor.actors.messages import Kind, OperationRequest

async def main(cluster):
    operation = await cluster.control.submit(OperationRequest(Kind.SLEEP, "toy"))
    operation = await cluster.control.wait(operation.id, 30)
    print(operation.state, operation.ranks[0].freed_bytes)

cluster = connect(sys.argv[1], sys.argv[2])
asyncio.run(main(cluster))
cluster.shutdown()
"""

KNOCKS = """
import sys
from torpor.actors.ray.knocking import knock
try:
    knock(sys.argv[1])
except OSError as error:
    print(error)
"""


async def test_another_process_connects_puts_a_model_to_sleep_and_leaves_the_cluster_running(
    make_torpor: MakeTorpor,
) -> None:
    torpor = await make_torpor().loaded()
    address = ray.get_runtime_context().gcs_address
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", "-c", CLIENT, torpor.config.namespace, address),
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    assert output.split()[0] == b"succeeded"
    view = await torpor.view()
    assert (view.state, view.gate_reason) == (ModelState.ASLEEP, GateReason.ASLEEP)
    await torpor.wake()
    assert "".join(event.text for event in await read(torpor.cluster.inference, request(3))) == "xxx"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:1", "at 127.0.0.1:1 .*refused.*ray start --head"),
        ("ray://head", "not HOST:PORT, such as"),
        ("head", "not HOST:PORT, such as"),
    ],
)
def test_an_address_without_a_cluster_is_told_at_once_with_what_to_do(address: str, says: str) -> None:
    began = time.monotonic()
    with pytest.raises(NoCluster, match=says):
        connect("torpor", address)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["nothing", "HTTP"])
def test_who_listens_and_is_not_ray_is_told_in_time_and_ray_is_not_begun(
    answer: bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray would ask him for five minutes, and write of it in lines of its own."""
    monkeypatch.setattr(knocking, "ANSWER_S", 1.0)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was begun"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    there = listener.accept()[0]
                    there.sendall(answer)
                    inside.append(there)

        inside: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(
            NoCluster, match=r"does not answer as Ray does.*; start one with `ray start --head`"
        ):
            connect("torpor", f"127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)
    assert time.monotonic() - began < 10
    assert capfd.readouterr() == ("", "")
    for each in inside:
        each.close()


def test_a_head_that_takes_another_token_says_so(local_ray: None) -> None:
    address = ray.get_runtime_context().gcs_address
    knocking.knock(address)
    known = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KNOCKS, address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_AUTH_TOKEN": "b" * 64},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert known.stdout == "it takes another token, or none\n", known.stderr


def test_the_coordinator_stays_where_its_journal_is() -> None:
    """On a node that is marked for it; in a cluster without one, on the node that it was started from."""
    here = "ab" * 28  # as Ray writes node ids
    assert journal_node(True, here) == {"resources": {"torpor_journal": 0.001}}
    strategy = journal_node(False, here)["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == (here, False)
