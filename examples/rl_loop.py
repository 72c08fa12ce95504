"""Reinforcement learning on one GPU: rollouts by Torpor, training in the memory that the model gives back.

    python examples/rl_loop.py

Each round: sample answers, let the model sleep, take one policy-gradient step with weights, gradients and Adam's
moments on the same device, hand the weights over, wake. A host device plays the GPU, and the model is tiny and
random; it learns to answer in small letters. It starts a Ray of its own, and takes half a minute.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Ray reads these when it is imported. In a cluster of yours they are set already.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from torpor.native import Device, Ledger, OutOfMemory
from torpor.service import Client

MIB = 1 << 20
CAPACITY = 64 * MIB
ROUNDS, SAMPLES, TOKENS = 5, 16, 24
PROMPT = list(b"Write: ")  # a model without a tokenizer reads bytes
WANTED = torch.zeros(320)
WANTED[list(b"abcdefghijklmnopqrstuvwxyz")] = 1.0
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
}
CONFIG = """
models:
  - name: policy
    engine: {{kind: transformers, model: {folder}, load_format: dummy}}
    kv_cache: {{gpu_bytes: 48MiB, host_bytes: 0}}
device: {{kind: host, host_capacity: 64MiB, name: {device}}}
host_pool: {{bytes: 64MiB}}
journal: {{path: {folder}/journal.db}}
"""


class Trainer:
    """The policy, its gradients and Adam's two moments in one region of the device, which sleeps between the steps."""

    def __init__(self, config: Path, device: Device) -> None:
        self.ledger = Ledger(device)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config.read_text())))
        self.weights = list(self.model.parameters())
        self.state_bytes = 4 * 4 * sum(weight.numel() for weight in self.weights)
        self.optimizer = torch.optim.Adam(self.weights, lr=0.006)

    def take_memory(self) -> None:
        """Raises OutOfMemory while the device is taken by others."""
        region = torch.from_dlpack(self.ledger.create_region("training", self.state_bytes))
        weights, gradients, first, second = region.view(torch.float32)[: self.state_bytes // 4].chunk(4)
        at = 0
        for weight in self.weights:
            part = slice(at, at := at + weight.numel())
            weights[part] = weight.detach().flatten()
            weight.data = weights[part].view_as(weight)
            weight.grad = gradients[part].view_as(weight).zero_()
            self.optimizer.state[weight] = {
                "step": torch.zeros(()),
                "exp_avg": first[part].view_as(weight).zero_(),
                "exp_avg_sq": second[part].view_as(weight).zero_(),
            }

    def step(self, answers: list[list[int]]) -> tuple[float, float]:
        """One step of REINFORCE; (mean reward, loss)."""
        tokens = torch.tensor([PROMPT + answer for answer in answers])
        logits = self.model(tokens[:, :-1]).logits[:, len(PROMPT) - 1 :]
        chosen = tokens[:, len(PROMPT) :]
        reward = WANTED[chosen]
        likelihood = logits.log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
        loss = -((reward - reward.mean()) * likelihood).mean()
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        self.optimizer.step()
        return reward.mean().item(), loss.item()

    def policy(self) -> dict[str, torch.Tensor]:
        """A copy of the weights, in memory of this process."""
        return {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def turn(self, kind: str) -> None:
        """Give the memory back, contents kept in host memory, or take it again."""
        plan = self.ledger.preflight(kind, kind, restore={"training": "cpu"} if kind == "sleep" else {})
        self.ledger.stage(plan, timeout_s=30.0)
        self.ledger.commit()
        self.ledger.publish()


def rollout(client: Client, round_: int) -> tuple[list[list[int]], str]:
    answer = client.complete(
        "policy",
        PROMPT,
        n=SAMPLES,
        max_tokens=TOKENS,
        temperature=1.0,
        seed=1000 * round_,
        return_token_ids=True,
    )
    return [choice["token_ids"] for choice in answer["choices"]], answer["choices"][0]["text"]


@contextmanager
def cluster(folder: Path, device: str) -> Iterator[Client]:
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "torpor.yaml").write_text(CONFIG.format(folder=folder, device=device))
    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, namespace="torpor")
    address = ray.get_runtime_context().gcs_address
    torpor = [sys.executable, "-m", "torpor.service.cli"]
    subprocess.run([*torpor, "apply", "-f", str(folder / "torpor.yaml"), "--address", address], check=True)
    with Client.from_ray() as client:
        yield client
    ray.get(ray.get_actor("torpor-coordinator").shutdown.remote())
    ray.shutdown()


def main() -> None:
    torch.manual_seed(0)
    name = f"rl-{os.getpid()}"
    device = Device.host(f"{name}-0", CAPACITY)  # the one on which rank 0 lives
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), name) as client:
        trainer = Trainer(Path(folder) / "config.json", device)
        client.update_weights("policy", trainer.policy())
        free, needed = device.memory_info()[0] // MIB, trainer.state_bytes // MIB
        try:
            trainer.take_memory()
        except OutOfMemory:
            print(f"awake: {free} MiB free, training needs {needed} MiB: refused")
        else:
            raise SystemExit("the model's memory was free while it was awake")
        for round_ in range(ROUNDS):
            answers, text = rollout(client, round_)
            with client.asleep("policy", restore={"weights": "none"}) as freed:
                trainer.turn("wake") if round_ else trainer.take_memory()
                reward, loss = trainer.step(answers)
                policy = trainer.policy()
                trainer.turn("sleep")
                client.wake("policy", tags=["weights"])
                record = client.update_weights("policy", policy)
            print(
                f"round {round_}: reward {reward:.3f}, loss {loss:+.4f}, trained in the "
                f"{sum(freed.bytes.values()) // MIB} MiB freed, weights version {record['weights_version']}, {text!r}"
            )
        answers, text = rollout(client, ROUNDS)
        reward = WANTED[torch.tensor(answers)].mean().item()
        print(f"after: reward {reward:.3f}, {text!r}")


if __name__ == "__main__":
    main()
