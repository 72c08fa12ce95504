"""`torpor apply` as a process of its own on a real Ray: ranks outlive it, memory of what goes is really free."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from chart.rendering import CHART, needs_helm, render
from ranks.torpors import CAPACITY_BYTES, read, request
from ranks.toys import KV_BYTES, WEIGHTS_BYTES
from ray.util import placement_group_table

from torpor.actors.messages import Kind, ModelState, OperationRequest, OperationState
from torpor.actors.ray.inference import RayInference
from torpor.actors.ray.names import COORDINATOR
from torpor.actors.ray.ports import RayControl
from torpor.native import Device

FILE = """
models: [{models}]
device: {{kind: host, count: 2, host_capacity: 128MiB, name: {name}}}
host_pool: {{bytes: 64MiB}}
journal: {{path: {folder}/journal.db}}
ray: {{namespace: {name}}}
"""
TOY = "engine: {kind: 'ranks.toys:make_engine', model: toy}"


class Applied:
    """One namespace, and what is applied to it."""

    def __init__(self, folder: Path) -> None:
        self.name = f"apply-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.folder = folder
        self.control = RayControl(self.name)

    async def apply(self, *models: str, expect: int = 0, flags: tuple[str, ...] = ()) -> dict[str, Any]:
        """The report of a `torpor apply --json` that ends with this exit code."""
        text = FILE.format(models=", ".join(models), name=self.name, folder=self.folder)
        return await self.apply_text(text, expect, flags)

    async def apply_text(self, text: str, expect: int = 0, flags: tuple[str, ...] = ()) -> dict[str, Any]:
        file = self.folder / "torpor.yaml"
        file.write_text(text)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORPOR_")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "torpor.service.cli",
            "apply",
            "-f",
            str(file),
            "--json",
        ]
        command += ["--address", ray.get_runtime_context().gcs_address, *flags]
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == expect, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def free_bytes(self, device: str) -> int:
        return Device.host(device.removeprefix("host:"), CAPACITY_BYTES).memory_info()[0]

    def groups(self) -> set[str]:
        return {
            each["name"].rpartition(":")[2]
            for each in placement_group_table().values()
            if f":{self.name}:" in each["name"] and each["state"] == "CREATED"
        }


@pytest.fixture
async def applied(local_ray: None, tmp_path: Path) -> AsyncIterator[Applied]:
    made = Applied(tmp_path)
    yield made
    coordinator = ray.get_actor(COORDINATOR, made.name)
    await coordinator.shutdown.remote()
    ray.kill(coordinator)


async def test_a_file_is_applied_changed_and_pruned_and_what_it_leaves_alone_goes_on(
    applied: Applied,
) -> None:
    one, two = f"{{name: one, {TOY}}}", f"{{name: two, {TOY}}}"
    report = await applied.apply(one, two)
    assert report["coordinator"] == "to be started"
    views = {view.name: view for view in await applied.control.models(detail=True)}
    assert {name: view.state for name, view in views.items()} == dict.fromkeys(
        ("one", "two"), ModelState.AWAKE
    )
    assert applied.groups() == {"one", "two"}
    taken = {name: view.devices[0] for name, view in views.items()}
    assert {applied.free_bytes(device) for device in taken.values()} == {
        CAPACITY_BYTES - WEIGHTS_BYTES - KV_BYTES
    }

    wider = f"{{name: three, {TOY}, tensor_parallel: 2}}"
    report = await applied.apply(one, wider, flags=("--prune",))
    actions = {step["model"]: step["action"] for step in report["steps"]}
    assert actions == {"one": "keep", "three": "create", "two": "prune"}
    assert applied.groups() == {"one", "three"}
    after = {view.name: view for view in await applied.control.models(detail=True)}
    assert set(after) == {"one", "three"}
    assert after["one"].ranks[0].pid == views["one"].ranks[0].pid
    assert sorted(after["three"].devices) == sorted(taken.values()), (
        "the place of the deleted one is free again"
    )
    assert applied.free_bytes(taken["two"]) == CAPACITY_BYTES - WEIGHTS_BYTES - KV_BYTES
    front_end = RayInference(applied.name, applied.control)
    assert "".join(event.text for event in await read(front_end, request(3), "three")) == "xxx"
    await front_end.close()


@needs_helm
async def test_what_the_chart_gives_the_head_is_applied_and_each_of_its_models_sleeps_and_wakes(
    applied: Applied,
) -> None:
    """The shape with several models, on host devices and with toys for engines: what else it says is left alone."""
    config = yaml.safe_load(render(CHART / "ci" / "several-models-values.yaml").config_text)
    for model in config["models"]:
        model["engine"]["kind"] = "ranks.toys:make_engine"
    config |= {
        "device": {"kind": "host", "count": 2, "host_capacity": "128MiB", "name": applied.name},
        "node": {"disk_path": str(applied.folder)},
        "journal": {"path": f"{applied.folder}/journal.db"},
        "ray": {"namespace": applied.name},
    }
    await applied.apply_text(yaml.safe_dump(config))
    views = await applied.control.models(detail=True)
    assert {view.name: view.state for view in views} == dict.fromkeys(
        ("chat", "code", "judge"), ModelState.AWAKE
    )
    awake = {device: applied.free_bytes(device) for view in views for device in view.devices}
    for kind, state in ((Kind.SLEEP, ModelState.ASLEEP), (Kind.WAKE, ModelState.AWAKE)):
        for view in views:
            done = await applied.control.wait(
                (await applied.control.submit(OperationRequest(kind, view.name))).id
            )
            assert done.state is OperationState.SUCCEEDED, done.reason
            assert (await applied.control.model(view.name)).state is state
        if kind is Kind.SLEEP:
            assert {applied.free_bytes(device) for device in awake} == {CAPACITY_BYTES}
    assert {device: applied.free_bytes(device) for device in awake} == awake


@pytest.mark.long
async def test_a_recreated_model_serves_again_and_a_killed_coordinator_knows_what_was_applied(
    applied: Applied,
) -> None:
    await applied.apply(f"{{name: one, {TOY}}}")
    before = await applied.control.model("one")
    front_end = RayInference(applied.name, applied.control)
    assert "".join(event.text for event in await read(front_end, request(3), "one")) == "xxx"
    bigger = f"{{name: one, {TOY}, kv_cache: {{gpu_bytes: 8MiB}}}}"
    report = await applied.apply(bigger)
    assert report["steps"][0]["action"] == "recreate"
    recreated = await applied.control.model("one")
    assert recreated.ranks[0].pid != before.ranks[0].pid
    os.kill(await ray.get_actor(COORDINATOR, applied.name).pid.remote(), 9)
    report = await applied.apply(bigger)
    assert report["steps"][0]["action"] == "keep"
    assert (await applied.control.model("one")).ranks[0].pid == recreated.ranks[0].pid
    assert "".join(event.text for event in await read(front_end, request(3), "one")) == "xxx"
    await front_end.close()
