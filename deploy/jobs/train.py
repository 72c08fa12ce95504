"""A training job around which a model sleeps: its GPU memory is the job's meanwhile, and comes back at the end.

    ray job submit --working-dir deploy/jobs -- python train.py MODEL [NAMESPACE]

The model sleeps under a lease: should this job die, `on_expiry` wakes the model. Its placement group keeps the GPU in
Ray's books, so the trainer runs beside it with num_gpus=0, or in a group that it lends (examples/shared_gpu.py).
"""

from __future__ import annotations

import sys

import ray
import torch

from torpor.service import Client


@ray.remote(num_cpus=0, num_gpus=0)
def train(steps: int) -> float:
    """Somebody's training; the last loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = torch.nn.Linear(256, 256, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    data = torch.randn(64, 256, device=device)
    for _ in range(steps):
        loss = (layer(data) - data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)


def main(model: str, namespace: str = "torpor") -> None:
    with (
        Client.from_ray(namespace=namespace) as torpor,
        torpor.asleep(model, restore={"weights": "pinned"}, on_expiry="wake") as freed,
    ):
        print(f"{model} sleeps, {sum(freed.bytes.values())} bytes are free")
        print(f"trained, the loss is {ray.get(train.remote(20)):.3f}")
    print(f"{model} is awake again")


if __name__ == "__main__":
    main(*sys.argv[1:])
