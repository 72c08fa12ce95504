"""The coordinator assigns GPUs by UUID, and ranks really are on them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")  # without it run.sh fails already, and says so
from ranks.torpors import ENGINE, MIB
from ranks.toys import KV_BYTES, WEIGHTS_BYTES

from torpor.actors.cluster import Cluster, start_local
from torpor.actors.config import ClusterConfig, DeviceConfig, HostPoolConfig, ModelConfig
from torpor.actors.messages import Kind, OperationRequest, OperationState
from torpor.actors.rank.offer import list_gpus

pytestmark = pytest.mark.gpu
SHARE = 0.5


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two models on each half of a GPU."""
    here = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", "")))))
    models = tuple(ModelConfig(name, ENGINE, gpus_per_rank=SHARE) for name in ("one", "two"))
    config = ClusterConfig(
        models,
        DeviceConfig("cuda"),
        host_pool=HostPoolConfig(64 * MIB),
        journal_path=str(tmp_path / "journal.db"),
    )
    started = start_local(config)
    yield started
    started.shutdown()


def free_bytes(uuid: str) -> int:
    """Of the GPU that the driver calls so."""
    from cuda.bindings import driver  # where there is no GPU, it is not installed

    assert driver.cuInit(0)[0] == driver.CUresult.CUDA_SUCCESS
    for ordinal in range(driver.cuDeviceGetCount()[1]):
        _, device = driver.cuDeviceGet(ordinal)
        raw = driver.cuDeviceGetUuid(device)[1].bytes[:16].hex()
        if f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}" == uuid:
            _, context = driver.cuDevicePrimaryCtxRetain(device)
            driver.cuCtxPushCurrent(context)
            free = int(driver.cuMemGetInfo()[1])
            driver.cuCtxPopCurrent()
            driver.cuDevicePrimaryCtxRelease(device)
            return free
    raise AssertionError(f"the driver knows no {uuid}")


def test_ranks_are_on_the_gpus_that_were_assigned_by_uuid(cluster: Cluster) -> None:
    """M1: what a sleep frees is free on the assigned GPU, as another process sees it."""
    asyncio.run(sleep_each(cluster))


async def sleep_each(cluster: Cluster) -> None:
    await cluster.wait_until_loaded(120)
    views = await cluster.control.models(detail=True)
    gpus = list_gpus()
    for view in views:
        assert view.devices == [rank.device_id for rank in view.ranks]
        assert set(view.devices) <= set(gpus)
    assert len({view.devices[0] for view in views}) == min(2, len(gpus)), (
        "the one with the least load is taken"
    )
    for view in views:
        before = free_bytes(view.devices[0])
        operation = await cluster.control.submit(OperationRequest(Kind.SLEEP, view.name))
        operation = await cluster.control.wait(operation.id, 60)
        assert operation.state is OperationState.SUCCEEDED, operation.reason
        assert free_bytes(view.devices[0]) - before >= (WEIGHTS_BYTES + KV_BYTES) * 3 // 4
