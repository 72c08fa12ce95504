"""Seats on a Ray of its own that believes in two GPUs: python imaginary_gpus.py FOLDER. Prints the devices as JSON.

Ranks are born and asked what they are offered, and load nothing: so far nobody touches a GPU.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path

import ray
from ray.util import placement_group

from torpor.actors.config import ClusterConfig, DeviceConfig, EngineConfig, ModelConfig, PlacementConfig
from torpor.actors.coordinator.journal import Journal
from torpor.actors.coordinator.seating import Seating
from torpor.actors.ray.calls import call
from torpor.actors.ray.launch import Launcher
from torpor.actors.seats import NotSeated

TOY = EngineConfig(kind="ranks.toys:make_engine")
HALVES = tuple(ModelConfig(name, TOY, 2) for name in ("one", "two"))  # four ranks on two GPUs
WHOLE = tuple(ModelConfig(name, TOY) for name in ("three", "four"))
LENT = (ModelConfig("borrower", TOY, 2, gpus_per_rank=0.1, placement=PlacementConfig("trainers")),)
UNTOLD = (ModelConfig("untold", TOY, 2, placement=PlacementConfig("trainers")),)


async def seat(models: tuple[ModelConfig, ...], seating: Seating) -> dict[str, list[str]]:
    """Devices by model, given back again at the end."""
    launcher = Launcher(ClusterConfig(models, DeviceConfig("cuda"), namespace="gpus"), seating)
    found: dict[str, list[str]] = {}
    for model in models:
        handles = await launcher.create(model, 1, {})
        offers = await asyncio.gather(*(call(handle, "offer") for handle in handles))
        try:
            seats = await seating.take(launcher._wish(model), offers)
            found[model.name] = [each.device for each in seats]
        except NotSeated as error:
            found[model.name] = [str(error)]
        found[f"{model.name} by Ray"] = [offer.given for offer in offers]
    for model in models:
        launcher.remove(model)
    for _ in range(100):
        if not any(handle is not None for model in models for handle in launcher.find(model)):
            return found
        await asyncio.sleep(0.1)
    raise TimeoutError("the ranks do not end")


async def main(folder: Path) -> None:
    journal = await Journal.open(folder / "journal.db")
    seating = Seating()
    await seating.open(journal, ())
    found = await seat(HALVES, seating) | await seat(WHOLE, seating)
    group = placement_group([{"GPU": 1}, {"GPU": 1}], name="trainers")
    await group.ready()
    found |= await seat(LENT, seating) | await seat(UNTOLD, seating)
    await journal.close()
    print(json.dumps(found))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    tool = path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    tool.chmod(0o755)
    os.environ["PATH"] = f"{path}{os.pathsep}{os.environ['PATH']}"
    ray.init(
        address="local",
        num_cpus=1,
        num_gpus=2,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace="gpus",
    )
    asyncio.run(main(path))
    ray.shutdown()
