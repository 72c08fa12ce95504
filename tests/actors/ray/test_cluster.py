"""Finding a cluster from another process, and leaving it as it was."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import pytest
import ray
from ranks.torpors import MakeTorpor, read, request

from torpor.actors.cluster import NoCluster, connect, journal_node
from torpor.actors.messages import GateReason, ModelState

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


def test_the_coordinator_stays_where_its_journal_is() -> None:
    """On a node that is marked for it; in a cluster without one, on the node that it was started from."""
    here = "ab" * 28  # as Ray writes node ids
    assert journal_node(True, here) == {"resources": {"torpor_journal": 0.001}}
    strategy = journal_node(False, here)["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == (here, False)
