"""A trainer and a model for its rollouts take turns on one GPU: the trainer lends its placement group to the model,
and has the memory for itself while the model sleeps.

    python examples/shared_gpu.py

It starts a Ray of its own. Without a GPU a host device plays one, and the trainer computes on the CPU.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Ray reads these when it is imported. In a cluster of yours they are set already.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
import torch
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from torpor.service import Client, ConnectionFailed

MODEL_SHARE = 0.1  # of the GPU, in Ray's books: the trainer has the rest
CONFIG = """
models:
  - name: rollout
    gpus_per_rank: {share}
    placement: {{group: trainer, bundles: [0]}}
    kv_cache: {{gpu_bytes: 256MiB, host_bytes: 256MiB}}
journal: {{path: {folder}/journal.db}}
"""
TORPOR = [sys.executable, "-m", "torpor.service.cli"]


@ray.remote
def train(prompt: str, answer: str) -> float:
    """One step of somebody's training, and its loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = torch.nn.Linear(256, 256, device=device)
    data = torch.full((8, 256), float(len(prompt) + len(answer)) / 100, device=device)
    loss = (layer(data) - data).square().mean()
    loss.backward()
    return loss.item()


@contextmanager
def front_end(config: Path) -> Iterator[Client]:
    """A front end of the running cluster, for as long as the block runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    address = ray.get_runtime_context().gcs_address
    command = [*TORPOR, "serve", "--connect", address, "--config", str(config), "--port", port]
    process = subprocess.Popen(command)
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            while True:
                try:
                    client.models()
                    break
                except ConnectionFailed:
                    if process.poll() is not None:
                        raise SystemExit("the front end has ended; see above") from None
                    time.sleep(0.2)
            yield client
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="torpor")
    gpus = ray.cluster_resources().get("GPU", 0)
    group = placement_group([{"CPU": 1, "GPU": 1} if gpus else {"CPU": 1}], name="trainer")
    ray.get(group.ready())
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    here = train.options(scheduling_strategy=place, num_gpus=1 - MODEL_SHARE if gpus else 0)

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "torpor.yaml"
        config.write_text(CONFIG.format(share=MODEL_SHARE if gpus else "null", folder=folder))
        address = ray.get_runtime_context().gcs_address
        subprocess.run([*TORPOR, "apply", "-f", str(config), "--address", address], check=True)
        with front_end(config) as client:
            for step in range(2):
                prompt = f"Name {step + 2} rivers."
                answer = client.chat("rollout", prompt, max_tokens=12).text
                with client.asleep("rollout", restore={"kv_cache": "none"}) as freed:
                    loss = ray.get(here.remote(prompt, answer))
                    print(
                        f"step {step}: trained in {sum(freed.bytes.values()) >> 20} MiB more, loss {loss:.4f}"
                    )
        coordinator = ray.get_actor("torpor-coordinator")
        ray.get(coordinator.shutdown.remote())  # ends the ranks; the trainer's group stays its own
    ray.shutdown()


if __name__ == "__main__":
    main()
