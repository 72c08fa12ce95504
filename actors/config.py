"""What a cluster is to look like, as frozen plain data. The YAML and environment reading is service/settings.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torpor.actors.limits import UNLIMITED
from torpor.actors.messages import OnDiscard, RestoreMode

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """model: a GGUF file, a safetensors folder, or (load_format dummy) a folder or file with a transformers config."""

    kind: str = "transformers"
    model: str = ""
    load_format: str = "auto"  # auto | gguf | safetensors | dummy
    dtype: str = "auto"  # auto = float32 on host devices, the checkpoint's on cuda
    seed: int = 0  # of dummy weights
    max_context_tokens: int | None = None  # None: the model's own
    max_running: int = 64
    max_waiting: int = 1024
    step_tokens: int = 512  # prefill tokens in one step
    attention: str = "auto"  # auto | torch | triton
    cuda_graphs: str = (
        "auto"  # auto | on | off: of decoding, on CUDA devices; on: also where no GPU has tried it yet
    )
    collectives: str = "auto"  # auto | gloo: of several ranks; auto = NCCL where each has a GPU of its own


@dataclass(frozen=True, slots=True)
class KvCacheConfig:
    tokens_per_block: int = 32
    gpu_bytes: int = 512 * MIB  # over one rank
    host_bytes: int = GIB
    disk_bytes: int = 0  # of the rank's share of node.disk_path
    cold_gpu_bytes: int = 0
    codec: str = "identity"  # identity | checked: of pages in cold tiers

    def tiers(self) -> dict[str, Any]:
        """What `Ledger.create_kv_manager` is to be told of them."""
        names = ("gpu_bytes", "host_bytes", "disk_bytes", "cold_gpu_bytes", "codec")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class GateConfig:
    """when_closed: reject | queue | wake. The bounds are of one front end."""

    when_closed: str = "wake"
    retry_after_s: int = 5
    queue_limit: int = 256  # requests that may wait
    queue_timeout_s: float = 60.0
    make_room: str = "none"  # none | idle: idle neighbours sleep for its wakes on request, and for its load


class RecoverPolicy(StrEnum):
    """Who sees to it that a failed model comes back."""

    AUTO = "auto"  # the coordinator, a few times
    MANUAL = "manual"  # a person, with `recover`


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """group: a named placement group that somebody lends; None = one of the model's own. Rank r is in bundles[r]."""

    group: str | None = None
    bundles: tuple[int, ...] | None = None  # None: bundle r


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: str
    engine: EngineConfig = field(default_factory=EngineConfig)
    tensor_parallel: int = 1
    kv_cache: KvCacheConfig = field(default_factory=KvCacheConfig)
    restore_modes: Mapping[str, RestoreMode] = field(
        default_factory=lambda: {"kv_cache": RestoreMode.NONE, "weights": RestoreMode.PINNED}
    )
    gate: GateConfig = field(default_factory=GateConfig)
    verify: bool = False
    prefill_backup: bool = False  # weights are saved while the model is awake, before its first sleep
    # None: a whole GPU where there are enough for all models, else an equal share; in a lent group, none.
    gpus_per_rank: float | None = None
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    sleep_after_idle_s: float | None = None
    recover: RecoverPolicy = RecoverPolicy.AUTO
    on_discard: OnDiscard = OnDiscard.RELOAD


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """kind auto = cuda if one is usable, else host."""

    kind: str = "auto"  # auto | host | cuda
    count: int = 1  # host devices of a node
    host_capacity_bytes: int = 4 * GIB
    name: str | None = None  # prefix of the host devices' names; None = one of this cluster's own
    # Tests only: wrap rank r's device in a FaultyDevice; {rank: {"fail_at": k, "delay": {call: seconds}}}.
    faults: Mapping[int, Mapping[str, object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeBudget:
    """Bytes that all ranks of a node may keep.

    host_bytes None: the limit of the node's cgroup or machine less a reserve. disk_bytes None: what is free there.
    disk_path: a folder, the same on each node; None: nothing is kept on disks.
    """

    host_bytes: int | None = None
    disk_bytes: int | None = None
    disk_path: str | None = None

    def disk(self) -> dict[str, Any]:
        """What a rank's `Ledger` is to be told of its disk; the coordinator sees to it that all keep within it."""
        if self.disk_path is None:
            return {}
        limit_bytes = UNLIMITED if self.disk_bytes is None else self.disk_bytes
        return {"disk_path": self.disk_path, "disk_bytes": limit_bytes} if limit_bytes else {}


@dataclass(frozen=True, slots=True)
class HostPoolConfig:
    bytes: int = GIB  # kept between cycles, per node
    prefill: bool = False  # what a sleep will take of it is made before, while models are awake


@dataclass(frozen=True, slots=True)
class Deadlines:
    drain_s: float = 30.0
    preflight_s: float = 10.0
    stage_s: float = 60.0
    stage_bytes_per_s: float = 1e9
    commit_s: float = 10.0
    load_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    models: tuple[ModelConfig, ...]
    device: DeviceConfig = field(default_factory=DeviceConfig)
    node: NodeBudget = field(default_factory=NodeBudget)
    host_pool: HostPoolConfig = field(default_factory=HostPoolConfig)
    deadlines: Deadlines = field(default_factory=Deadlines)
    journal_path: str = "~/.local/state/torpor/journal.db"
    namespace: str = "torpor"
    weights_roots: tuple[str, ...] = ()  # folders that weights may be updated from


@dataclass(frozen=True, slots=True)
class RankSpec:
    """All that one rank is told at its birth."""

    model: ModelConfig
    rank: int
    incarnation: str
    device: DeviceConfig
    device_index: int  # which host device or CUDA ordinal, unless device_id says
    host_pool_bytes: int  # this rank's share
    process_group: str = ""  # "host:port" of the store where ranks meet; "" when tensor_parallel is 1
    step_channel: str = ""  # "host:port" where the leader listens for its followers
    channel_key: bytes = b""
    epoch: int = 0
    parked: Mapping[str, RestoreMode] = field(
        default_factory=dict
    )  # tags that sleep as soon as they have loaded
    node: NodeBudget = field(default_factory=NodeBudget)
    weights_roots: tuple[str, ...] = ()
    device_id: str = ""  # a GPU's UUID or "host:<name>", as the coordinator has assigned it
