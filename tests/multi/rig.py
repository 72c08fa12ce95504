"""What the tests of several ranks share: how many there are, on what, and how often; by the environment.

tests/gpu/run_multi.sh sets it. Without it: two ranks on host devices over gloo, each thing once.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.engine_host import dummy_spec
from support.families import write_family

from torpor.actors.config import MIB, DeviceConfig, KvCacheConfig, RankSpec
from torpor.actors.engine.group import GLOO, NCCL

MODES = ("none", "memset", "cpu", "pinned", "disk")
DISCARDING = ("none", "memset")
PROMPTS = [[random.Random(f"multi {n}").randrange(256) for _ in range(n)] for n in (5, 33, 70)]
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4}  # what four ranks divide, too


@dataclass(frozen=True)
class Rig:
    """kind: host or cuda."""

    kind: str
    ranks: int
    cycles: int

    @classmethod
    def of_environment(cls) -> Rig:
        wanted = os.environ.get
        return cls(
            wanted("TORPOR_MULTI_DEVICE", "host"),
            int(wanted("TORPOR_MULTI_RANKS", "2")),
            int(wanted("TORPOR_MULTI_CYCLES", "1")),
        )

    @property
    def on_gpus(self) -> bool:
        return self.kind == "cuda"

    @property
    def collectives(self) -> str:
        return NCCL if self.on_gpus else GLOO

    @property
    def cache(self) -> KvCacheConfig:
        """On a GPU large enough that nothing else that comes and goes there hides it."""
        size_bytes = (256 if self.on_gpus else 4) * MIB
        return KvCacheConfig(tokens_per_block=8, gpu_bytes=size_bytes, host_bytes=size_bytes)

    @property
    def slack_bytes(self) -> int:
        """What the driver may round."""
        return 32 * MIB if self.on_gpus else 0

    def spec(self, folder: Path, family: str, **engine: Any) -> RankSpec:
        """In float32; with graphs where there can be some."""
        options = {"step_tokens": 16, "dtype": "float32", "max_running": 8, "cuda_graphs": "on"} | engine
        config = write_family(folder, family, **SHAPE)
        spec = dummy_spec(config, kv=self.cache, tensor_parallel=self.ranks, **options)
        return replace(spec, device=DeviceConfig(kind=self.kind))
