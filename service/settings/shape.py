"""The configuration file's shape: strict, closed models of this version's keys; their way to a ClusterConfig.

Reading files and the environment is load.py.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from torpor.actors.config import (
    GIB,
    MIB,
    ClusterConfig,
    Deadlines,
    DeviceConfig,
    EngineConfig,
    GateConfig,
    HostPoolConfig,
    KvCacheConfig,
    ModelConfig,
    NodeBudget,
    PlacementConfig,
    RecoverPolicy,
)
from torpor.actors.messages import OnDiscard, RestoreMode
from torpor.service.addresses import is_loopback
from torpor.service.ending import EndTimes
from torpor.service.limits.bounds import Bounds
from torpor.service.units import parse_duration_s, parse_size_bytes

SizeBytes = Annotated[int, BeforeValidator(parse_size_bytes)]
DurationS = Annotated[float, BeforeValidator(parse_duration_s), Field(gt=0)]
ModeName = Literal["none", "memset", "cpu", "pinned", "disk"]


# What the default engine may have, on any device; others make tags of their own.
_TAGS = ("cuda_graph", "kv_cache", "weights", "workspace")
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NO_DISK = "there is no disk to keep it on; set node.disk_path to an existing folder, or choose otherwise"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class EngineSettings(_Section):
    kind: str = "transformers"  # or module:factory
    model: str = ""  # "" = the default small model
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    load_format: Literal["auto", "gguf", "safetensors", "dummy"] = "auto"
    seed: Annotated[int, Field(ge=0)] = 0
    max_context_tokens: Annotated[int, Field(gt=0)] | None = None
    max_running: Annotated[int, Field(gt=0)] = 64
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    step_tokens: Annotated[int, Field(gt=0)] = 512
    attention: str = "auto"
    cuda_graphs: str = "auto"
    collectives: str = "auto"

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind != "transformers" and not _FACTORY.fullmatch(kind):
            raise ValueError(
                f"{kind!r} is no engine; transformers is the one that comes along, and module:factory names your own"
            )
        return kind


class KvCacheSettings(_Section):
    tokens_per_block: Annotated[int, Field(gt=0, le=1024)] = 32
    gpu_bytes: Annotated[SizeBytes, Field(gt=0)] = 512 * MIB
    host_bytes: SizeBytes = GIB
    disk_bytes: SizeBytes = 0
    cold_gpu_bytes: SizeBytes = 0
    codec: Literal["identity", "checked"] = "identity"


class GateSettings(_Section):
    when_closed: Literal["reject", "queue", "wake"] = "wake"
    retry_after_s: Annotated[int, Field(ge=1, le=3600)] = 5
    queue_limit: Annotated[int, Field(ge=1, le=100_000)] = 256
    queue_timeout_s: DurationS = 60.0
    make_room: Literal["none", "idle"] = "none"


class PlacementSettings(_Section):
    """A placement group that somebody lends, and the bundle of each rank."""

    group: Annotated[str, Field(min_length=1)] | None = None
    bundles: list[Annotated[int, Field(ge=0)]] | None = None


class ModelSettings(_Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    engine: EngineSettings = EngineSettings()
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    kv_cache: KvCacheSettings = KvCacheSettings()
    restore_modes: dict[str, ModeName] = Field(default_factory=dict)
    gate: GateSettings = GateSettings()
    verify: bool = False
    prefill_backup: bool = False
    sleep_after_idle_s: DurationS | None = None
    gpus_per_rank: Annotated[float, Field(gt=0, le=1)] | None = None
    placement: PlacementSettings = PlacementSettings()
    recover: Literal["auto", "manual"] = "auto"
    on_discard: Literal["reload", "wait"] = "reload"

    @model_validator(mode="after")
    def _backup_has_a_use(self) -> Self:
        mode = self.restore_modes.get("weights", "pinned")
        if self.prefill_backup and mode not in ("pinned", "cpu"):
            raise ValueError(
                f"prefill_backup keeps weights in host memory, and restore_modes.weights is {mode}; set that to pinned "
                "or cpu, or remove prefill_backup"
            )
        return self

    @model_validator(mode="after")
    def _bundles_fit(self) -> Self:
        bundles = self.placement.bundles
        if bundles is not None and self.placement.group is None:
            raise ValueError(
                "placement.bundles without placement.group; name the group that lends them, or remove it"
            )
        if bundles is not None and len(bundles) != self.tensor_parallel:
            raise ValueError(
                f"placement.bundles names {len(bundles)} bundles for {self.tensor_parallel} ranks; one for each rank"
            )
        return self


class DeviceSettings(_Section):
    kind: Literal["auto", "host", "cuda"] = "auto"
    count: Annotated[int, Field(ge=1, le=64)] | None = None  # None = as many as the largest model has ranks
    host_capacity: Annotated[SizeBytes, Field(gt=0)] = 4 * GIB
    name: str | None = None


class NodeSettings(_Section):
    host_bytes: SizeBytes | None = None
    disk_bytes: SizeBytes | None = None  # None: what is free there
    disk_path: Annotated[str, Field(min_length=1)] | None = (
        None  # an existing folder; None: nothing goes to disks
    )


class HostPoolSettings(_Section):
    bytes: SizeBytes = GIB
    prefill: bool = False


class DeadlineSettings(_Section):
    drain_s: DurationS = 30.0
    preflight_s: DurationS = 10.0
    stage_s: DurationS = 60.0
    stage_bytes_per_s: Annotated[SizeBytes, Field(gt=0)] = 10**9
    commit_s: DurationS = 10.0
    load_s: DurationS = 600.0


class HttpSettings(_Section):
    """trusted_proxies: addresses or networks whose X-Forwarded-For says where a request is from; of others it is not
    believed, for it decides who comes too often, and stands in the audit.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8700  # 0 = any free one
    trusted_proxies: tuple[str, ...] = ()

    @field_validator("trusted_proxies", mode="before")
    @classmethod
    def _list_is_fine(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for proxy in proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                raise ValueError(
                    f"{proxy!r} is no address or network, such as 10.0.0.7 or 10.0.0.0/8"
                ) from None
        return proxies


class AuthSettings(_Section):
    """tokens_file: a path, looked up beside the configuration file when relative. None: no tokens, loopback only."""

    tokens_file: Annotated[str, Field(min_length=1)] | None = None


class LimitSettings(_Section):
    """Of one front end; service/limits/bounds.py says what each bounds."""

    body_bytes: Annotated[SizeBytes, Field(ge=1024)] = Bounds().body_bytes
    body_timeout_s: DurationS = Bounds().body_timeout_s
    inference_requests: Annotated[int, Field(ge=1, le=1_000_000)] = Bounds().inference_requests
    control_requests: Annotated[int, Field(ge=1, le=1_000_000)] = Bounds().control_requests
    event_streams: Annotated[int, Field(ge=0, le=1_000_000)] = Bounds().event_streams
    requests_per_s: Annotated[float, Field(gt=0, le=1e9, strict=False)] | None = Bounds().requests_per_s
    burst: Annotated[int, Field(ge=1, le=1_000_000_000)] = Bounds().burst


class ShutdownSettings(_Section):
    """What a front end does after SIGTERM or SIGINT; service/ending.py. park counts with `serve --connect` only."""

    notice_s: Annotated[float, BeforeValidator(parse_duration_s), Field(ge=0, le=3600)] = EndTimes().notice_s
    drain_s: Annotated[float, BeforeValidator(parse_duration_s), Field(ge=0, le=86400)] = EndTimes().drain_s
    park: bool = EndTimes().park
    park_timeout_s: DurationS = EndTimes().park_timeout_s


class RaySettings(_Section):
    """address: of the Ray cluster that `serve --connect` and `apply` join; auto = RAY_ADDRESS, or this machine's."""

    address: Annotated[str, Field(min_length=1)] = "auto"
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "torpor"


class JournalSettings(_Section):
    path: str = "~/.local/state/torpor/journal.db"


class Settings(_Section):
    models: Annotated[tuple[ModelSettings, ...], Field(min_length=1)]
    device: DeviceSettings = DeviceSettings()
    node: NodeSettings = NodeSettings()
    host_pool: HostPoolSettings = HostPoolSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    http: HttpSettings = HttpSettings()
    auth: AuthSettings = AuthSettings()
    limits: LimitSettings = LimitSettings()
    shutdown: ShutdownSettings = ShutdownSettings()
    journal: JournalSettings = JournalSettings()
    ray: RaySettings = RaySettings()
    weights_roots: tuple[str, ...] = ()  # absolute folders of the ranks' nodes

    @field_validator("models", "weights_roots", mode="before")
    @classmethod
    def _list_is_fine(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("weights_roots")
    @classmethod
    def _absolute(cls, roots: tuple[str, ...]) -> tuple[str, ...]:
        for root in roots:
            if not Path(root).expanduser().is_absolute():
                raise ValueError(f"{root!r} is not an absolute path; begin it with / or ~/")
        return roots

    @model_validator(mode="after")
    def _open_to_others_with_tokens_only(self) -> Self:
        if self.auth.tokens_file is None and not is_loopback(self.http.host):
            raise ValueError(
                f"http.host: {self.http.host!r} is not a loopback address, and without tokens whoever reaches it may do "
                "everything; set auth.tokens_file, or listen on 127.0.0.1 and come through an SSH tunnel"
            )
        return self

    @model_validator(mode="after")
    def _there_is_a_disk(self) -> Self:
        if self.node.disk_path is not None and self.node.disk_bytes != 0:
            return self
        for index, model in enumerate(self.models):
            for tag, mode in model.restore_modes.items():
                if mode == "disk":
                    raise ValueError(f"models.{index}.restore_modes.{tag}: {_NO_DISK}")
            if model.kv_cache.disk_bytes:
                raise ValueError(f"models.{index}.kv_cache.disk_bytes: {_NO_DISK}")
        return self

    @model_validator(mode="after")
    def _tags_exist(self) -> Self:
        for index, model in enumerate(self.models):
            for tag in sorted(model.restore_modes):
                if model.engine.kind == "transformers" and tag not in _TAGS:
                    raise ValueError(
                        f"models.{index}.restore_modes.{tag}: no such tag; the engine's are {', '.join(_TAGS)}"
                    )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [model.name for model in self.models]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"models: each name once; repeated: {', '.join(repeated)}")
        return self


def cluster_config(settings: Settings) -> ClusterConfig:
    """Plain data for the actors. Paths must be resolved already (settings_load)."""
    ranks = max(model.tensor_parallel for model in settings.models)
    device = settings.device
    return ClusterConfig(
        models=tuple(_model_config(model) for model in settings.models),
        device=DeviceConfig(
            kind=device.kind,
            count=device.count if device.count is not None else ranks,
            host_capacity_bytes=device.host_capacity,
            name=device.name,
        ),
        node=NodeBudget(
            settings.node.host_bytes,
            settings.node.disk_bytes,
            str(Path(settings.node.disk_path).expanduser()) if settings.node.disk_path else None,
        ),
        host_pool=HostPoolConfig(settings.host_pool.bytes, settings.host_pool.prefill),
        deadlines=Deadlines(**settings.deadlines.model_dump()),
        journal_path=str(Path(settings.journal.path).expanduser()),
        namespace=settings.ray.namespace,
        weights_roots=tuple(str(Path(root).expanduser()) for root in settings.weights_roots),
    )


def _model_config(model: ModelSettings) -> ModelConfig:
    modes = {"kv_cache": RestoreMode.NONE, "weights": RestoreMode.PINNED}
    modes.update({tag: RestoreMode(mode) for tag, mode in model.restore_modes.items()})
    return ModelConfig(
        name=model.name,
        engine=EngineConfig(**model.engine.model_dump()),
        tensor_parallel=model.tensor_parallel,
        kv_cache=KvCacheConfig(**model.kv_cache.model_dump()),
        restore_modes=modes,
        gate=GateConfig(**model.gate.model_dump()),
        verify=model.verify,
        prefill_backup=model.prefill_backup,
        sleep_after_idle_s=model.sleep_after_idle_s,
        gpus_per_rank=model.gpus_per_rank,
        recover=RecoverPolicy(model.recover),
        on_discard=OnDiscard(model.on_discard),
        placement=PlacementConfig(
            model.placement.group,
            tuple(model.placement.bundles) if model.placement.bundles is not None else None,
        ),
    )
