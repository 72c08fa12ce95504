"""Configuration: what is read, what overrides, and that every error names its key and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.actors.config import GIB, MIB, GateConfig, HostPoolConfig, PlacementConfig
from torpor.actors.messages import RestoreMode
from torpor.service.settings.load import SettingsError, load_settings
from torpor.service.settings.shape import cluster_config
from torpor.service.units import parse_duration_s, parse_size_bytes, show_bytes

EXAMPLE = """
models:
  - name: chat
    engine: {kind: transformers, model: ./small.gguf, dtype: auto, load_format: auto}
    tensor_parallel: 3
    gpus_per_rank: 0.5
    placement: {group: trainer, bundles: [2, 0, 1]}
    kv_cache: {tokens_per_block: 16, gpu_bytes: 2GiB, host_bytes: 4GiB, disk_bytes: 0, cold_gpu_bytes: 0, codec: identity}
    restore_modes: {kv_cache: cpu, workspace: none}
    prefill_backup: true
    gate: {when_closed: queue, retry_after_s: 7, queue_limit: 9, queue_timeout_s: 1m, make_room: idle}
    verify: true
    sleep_after_idle_s: 10m
device: {kind: host, host_capacity: 1GB, name: lab}
node: {host_bytes: 3GiB, disk_bytes: null, disk_path: null}
host_pool: {bytes: 8MiB, prefill: true}
deadlines: {drain_s: 500ms, stage_s: 2m, stage_bytes_per_s: 1GB, commit_s: 10}
http: {host: "::1", port: 9000, trusted_proxies: [10.0.0.0/8, 10.9.0.1]}
auth: {tokens_file: null}
weights_roots: []
journal: {path: /var/lib/torpor/journal.db}
ray: {address: "10.0.0.7:6379", namespace: lab}
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "torpor.yaml"
    file.write_text(text)
    return file


def problems_of(folder: Path, text: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(write(folder, text), environment or {})
    return str(caught.value)


def test_without_a_file_the_small_model_gets_its_documented_sizes() -> None:
    config = cluster_config(load_settings(None, {}))
    (model,) = config.models
    assert (model.name, model.engine.model, model.tensor_parallel) == ("smollm2", "", 1)
    assert (model.kv_cache.gpu_bytes, model.kv_cache.host_bytes) == (512 * MIB, GIB)
    assert (config.host_pool.bytes, config.device.count, config.device.kind) == (GIB, 1, "auto")


def test_every_key_of_a_file_reaches_the_cluster_config(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, EXAMPLE), {})
    config = cluster_config(settings)
    (model,) = config.models
    assert model.engine.model == str(tmp_path / "small.gguf")
    assert (model.kv_cache.tokens_per_block, model.kv_cache.gpu_bytes) == (16, 2 * GIB)
    assert dict(model.restore_modes) == {
        "kv_cache": RestoreMode.CPU,
        "weights": RestoreMode.PINNED,
        "workspace": RestoreMode.NONE,
    }
    assert model.verify
    assert model.gate == GateConfig("queue", 7, 9, 60.0, "idle")
    assert model.sleep_after_idle_s == 600.0
    assert (model.gpus_per_rank, model.placement) == (0.5, PlacementConfig("trainer", (2, 0, 1)))
    assert (config.device.kind, config.device.count, config.device.name) == ("host", 3, "lab")
    assert (config.device.host_capacity_bytes, config.node.host_bytes) == (10**9, 3 * GIB)
    assert model.prefill_backup
    assert config.host_pool == HostPoolConfig(8 * MIB, prefill=True)
    deadlines = config.deadlines
    assert (deadlines.drain_s, deadlines.stage_s, deadlines.stage_bytes_per_s) == (0.5, 120.0, 10**9)
    assert config.journal_path == "/var/lib/torpor/journal.db"
    assert (settings.ray.address, config.namespace) == ("10.0.0.7:6379", "lab")
    assert (settings.http.host, settings.http.port) == ("::1", 9000)
    assert settings.http.trusted_proxies == ("10.0.0.0/8", "10.9.0.1")


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("http: {port: 1}\nmodels: []\nhttp: {port: 2}\n", "http", 3),
        ("models:\n- name: a\n  verify: true\n  name: b\n", "name", 4),
        ("http: {port: 1, host: a, port: 2}\n", "port", 1),
    ],
)
def test_a_key_that_stands_twice_is_refused_by_name_and_line(
    tmp_path: Path, text: str, key: str, line: int
) -> None:
    file = tmp_path / "torpor.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=rf"line {line}: the key '{key}' stands twice"):
        load_settings(file, {})


def test_any_address_may_be_listened_on_with_tokens_whose_file_lies_beside_the_configuration(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, ONE_MODEL + "http: {host: 0.0.0.0}\nauth: {tokens_file: tokens}\n")
    settings = load_settings(file, {})
    assert (settings.http.host, settings.auth.tokens_file) == ("0.0.0.0", str(tmp_path / "tokens"))


def test_the_environment_overrides_the_file_down_to_an_element_of_a_list(tmp_path: Path) -> None:
    environment = {
        "TORPOR_HTTP__PORT": "8701",
        "TORPOR_MODELS__0__KV_CACHE__GPU_BYTES": "64MiB",
        "TORPOR_MODELS__1__NAME": "second",
        "TORPOR_DEADLINES__DRAIN_S": "5s",
        "TORPOR_NODE__HOST_BYTES": "null",
        "TORPOR_MODELS__0__PREFILL_BACKUP": "false",
        "TORPOR_HOST_POOL__PREFILL": "false",
        "TORPOR_DEFAULT_MODEL": "/somewhere/else.gguf",
        "TORPOR_URL": "http://127.0.0.1:1",
        "PATH": "/bin",
    }
    settings = load_settings(write(tmp_path, EXAMPLE), environment)
    assert settings.http.port == 8701
    assert [model.name for model in settings.models] == ["chat", "second"]
    assert settings.models[0].kv_cache.gpu_bytes == 64 * MIB
    assert settings.models[0].verify
    assert settings.deadlines.drain_s == 5.0
    assert settings.node.host_bytes is None
    assert (settings.models[0].prefill_backup, settings.host_pool.prefill) == (False, False)


def test_a_whole_section_can_come_from_one_variable() -> None:
    settings = load_settings(None, {"TORPOR_MODELS": '[{"name": "one"}, {"name": "two"}]'})
    assert [model.name for model in settings.models] == ["one", "two"]


ONE_MODEL = "models: [{name: chat}]\n"
BAD = [
    # (YAML, what the message must name, and what to do)
    ("models: []\n", "models", "at least 1"),
    ("{}\n", "models", "is missing; set it"),
    ("models: [{}]\n", "models.0.name", "is missing"),
    ("models: [{name: a b}]\n", "models.0.name", "letters, digits"),
    ("models: [{name: a}, {name: a}]\n", "models", "each name once; repeated: a"),
    (ONE_MODEL + "htpp: {port: 1}\n", "htpp", "no such key"),
    ("models: [{name: a, engine: {modle: x}}]\n", "models.0.engine.modle", "no such key"),
    ("models: [{name: a, tensor_parallel: two}]\n", "models.0.tensor_parallel", "integer"),
    ("models: [{name: a, tensor_parallel: 0}]\n", "models.0.tensor_parallel", "greater than or equal to 1"),
    ("models: [{name: a, prefill_backup: 1}]\n", "models.0.prefill_backup", "boolean"),
    (
        "models: [{name: a, prefill_backup: true, restore_modes: {weights: none}}]\n",
        "models.0",
        "set that to pinned or cpu, or remove prefill_backup",
    ),
    (ONE_MODEL + "host_pool: {prefill: yes please}\n", "host_pool.prefill", "boolean"),
    ("models: [{name: a, verify: 'yes'}]\n", "models.0.verify", "boolean"),
    ("models: [{name: a, kv_cache: {gpu_bytes: 2 cows}}]\n", "models.0.kv_cache.gpu_bytes", "512MiB"),
    ("models: [{name: a, kv_cache: {gpu_bytes: -1}}]\n", "models.0.kv_cache.gpu_bytes", "512MiB"),
    ("models: [{name: a, kv_cache: {gpu_bytes: 0.5}}]\n", "models.0.kv_cache.gpu_bytes", "whole number"),
    ("models: [{name: a, restore_modes: {weights: tape}}]\n", "models.0.restore_modes.weights", "'pinned'"),
    (ONE_MODEL + "device: {kind: tpu}\n", "device.kind", "'cuda'"),
    (ONE_MODEL + "deadlines: {drain_s: soon}\n", "deadlines.drain_s", "500ms"),
    (ONE_MODEL + "deadlines: {drain_s: 0}\n", "deadlines.drain_s", "greater than 0"),
    (ONE_MODEL + "http: {port: 70000}\n", "http.port", "65535"),
    (ONE_MODEL + "http: {host: 0.0.0.0}\n", "http.host", "SSH tunnel"),
    (ONE_MODEL + "http: {host: 0.0.0.0}\n", "http.host", "set auth.tokens_file"),
    (ONE_MODEL + "http: {host: 0.0.0.0}\nauth: {tokens_file: null}\n", "http.host", "set auth.tokens_file"),
    (ONE_MODEL + "http: {host: 0.0.0.0}\nauth: {tokens_file: ''}\n", "auth.tokens_file", "at least 1"),
    (ONE_MODEL + "auth: {token_file: a}\n", "auth.token_file", "no such key"),
    (ONE_MODEL + "http: {trusted_proxies: [lb.local]}\n", "http.trusted_proxies", "10.0.0.0/8"),
    (ONE_MODEL + "http: {host: example.org}\n", "http.host", "loopback"),
    ("models: [{name: a, gpus_per_rank: 2}]\n", "models.0.gpus_per_rank", "less than or equal to 1"),
    ("models: [{name: a, placement: {bundles: [0]}}]\n", "models.0", "name the group that lends them"),
    (
        "models: [{name: a, placement: {group: t, bundles: [0, 1]}}]\n",
        "models.0",
        "2 bundles for 1 ranks; one for each",
    ),
    (ONE_MODEL + "ray: {namespace: a b}\n", "ray.namespace", "letters, digits"),
    ("models: [\n", "is not valid YAML in line 2", ""),
    ("just text\n", "holds no keys", "models"),
]


@pytest.mark.parametrize(("text", "key", "hint"), BAD)
def test_a_bad_file_is_refused_with_the_key_and_what_to_do(
    tmp_path: Path, text: str, key: str, hint: str
) -> None:
    message = problems_of(tmp_path, text)
    assert key in message
    assert hint in message


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    message = problems_of(tmp_path, "models: [{name: a, on_discard: never}]\nhtpp: {}\nhttp: {port: x}\n")
    assert all(key in message for key in ("models.0.on_discard", "htpp", "http.port"))


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("TORPOR_HTPP__PORT", "1", "htpp"),
        ("TORPOR_MODELS__5__NAME", "x", "no index"),
        ("TORPOR_MODELS__0__NAME__X", "x", "nothing below it"),
        ("TORPOR_HTTP__PORT", "[", "TORPOR_HTTP__PORT"),
        ("TORPOR_HTTP__HOST", "0.0.0.0", "SSH tunnel"),
    ],
)
def test_a_bad_variable_is_refused(tmp_path: Path, variable: str, value: str, hint: str) -> None:
    assert hint in problems_of(tmp_path, ONE_MODEL, {variable: value})


def test_a_missing_file_is_told_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nope\.yaml: cannot be read \(No such file"):
        load_settings(tmp_path / "nope.yaml", {})


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [(1048576, MIB), ("1048576", MIB), ("512MiB", 512 * MIB), ("1GB", 10**9), ("1.5 KiB", 1536), ("0", 0)],
)
def test_sizes_are_read_as_people_write_them(written: object, size_bytes: int) -> None:
    assert parse_size_bytes(written) == size_bytes


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(30, 30.0), (0.5, 0.5), ("30s", 30.0), ("500ms", 0.5), ("2m", 120.0), ("1h", 3600.0)],
)
def test_durations_are_read_as_people_write_them(written: object, seconds: float) -> None:
    assert parse_duration_s(written) == seconds


def test_sizes_are_shown_in_binary_units() -> None:
    assert [show_bytes(size) for size in (12, 1536, 512 * MIB, 3 * GIB)] == [
        "12 B",
        "1.5 KiB",
        "512.0 MiB",
        "3.0 GiB",
    ]


NO_DISK = (
    ("models: [{name: a, restore_modes: {weights: disk}}]\n", "models.0.restore_modes.weights"),
    (
        "models: [{name: a, kv_cache: {disk_bytes: 1GiB}}]\nnode: {disk_path: /tmp, disk_bytes: 0}\n",
        "disk_bytes",
    ),
)


@pytest.mark.parametrize(("text", "key"), NO_DISK)
def test_what_wants_a_disk_is_refused_without_one_by_its_key(tmp_path: Path, text: str, key: str) -> None:
    message = problems_of(tmp_path, text)
    assert key in message and "node.disk_path" in message


def test_the_tiers_and_the_disk_of_a_node_reach_the_cluster_s_configuration(tmp_path: Path) -> None:
    file = tmp_path / "torpor.yaml"
    file.write_text(
        "models: [{name: a, kv_cache: {disk_bytes: 2MiB, cold_gpu_bytes: 1MiB, codec: checked}, verify: true,"
        " restore_modes: {weights: disk}}]\nnode: {disk_path: /tmp, disk_bytes: 1GiB}\n"
    )
    config = cluster_config(load_settings(file, {}))
    (model,) = config.models
    tiers = model.kv_cache.tiers()
    assert (tiers["disk_bytes"], tiers["cold_gpu_bytes"], tiers["codec"]) == (2 << 20, 1 << 20, "checked")
    assert (model.verify, model.restore_modes["weights"].value) == (True, "disk")
    assert config.node.disk() == {"disk_path": "/tmp", "disk_bytes": 1 << 30}
