"""Which device a rank gets, and what is said when it cannot be had."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ranks.bench import CAPACITY_BYTES, spec

from torpor.actors.config import DeviceConfig, RankSpec
from torpor.actors.rank.device import DeviceUnusable, arm_faults, device_kind, make_device
from torpor.actors.rank.engines import UnknownEngine, factory_of
from torpor.native import DeviceError, FaultyDevice, Ledger, cuda_device_count

MIB = 1 << 20
no_gpu = pytest.mark.skipif(cuda_device_count() > 0, reason="this machine has a GPU")


def with_device(own_name: str, **changes: object) -> RankSpec:
    whole = spec(own_name)
    return replace(whole, device=replace(whole.device, faults={}, **changes))  # type: ignore[arg-type]


def test_ranks_with_one_index_share_a_host_device_and_others_have_their_own(device_name: str) -> None:
    first = make_device(with_device(device_name))
    ledger = Ledger(first)
    held = ledger.create_region("weights", 32 * MIB)
    same = make_device(with_device(device_name))
    other = make_device(replace(with_device(device_name), device_index=1))
    assert same.memory_info() == first.memory_info() == (CAPACITY_BYTES - 32 * MIB, CAPACITY_BYTES)
    assert other.memory_info()[0] == CAPACITY_BYTES
    assigned = make_device(replace(with_device(device_name), device_index=1, device_id=first.id))
    assert assigned.memory_info() == first.memory_info(), "what the coordinator has assigned counts"
    assert held.size_bytes == 32 * MIB


@no_gpu
def test_cuda_without_a_gpu_says_what_to_do(device_name: str) -> None:
    with pytest.raises(DeviceUnusable, match=r"no usable CUDA device.*nvidia-smi.*device\.kind to host"):
        make_device(with_device(device_name, kind="cuda"))


@no_gpu
def test_auto_is_the_host_where_there_is_no_gpu() -> None:
    assert device_kind(DeviceConfig(kind="auto")) == "host"


def test_a_kind_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(DeviceUnusable, match=r"'tpu'.*auto, host, cuda"):
        device_kind(DeviceConfig(kind="tpu"))


def test_a_host_device_without_a_name_is_refused(device_name: str) -> None:
    with pytest.raises(DeviceUnusable, match=r"device\.name"):
        make_device(with_device(device_name, name=None))


def test_faults_strike_the_configured_rank_and_only_once_armed(device_name: str) -> None:
    config = DeviceConfig("host", 1, CAPACITY_BYTES, device_name, {1: {"fail_at": 1}})
    healthy = make_device(replace(spec(device_name), device=config, rank=0))
    faulty = make_device(replace(spec(device_name), device=config, rank=1))
    assert not isinstance(healthy, FaultyDevice)
    ledger = Ledger(faulty)
    before = ledger.create_region("weights", 2 * MIB)
    arm_faults(faulty, config, 1)
    with pytest.raises(DeviceError):
        ledger.create_region("workspace", 2 * MIB)
    assert ledger.create_region("workspace", 2 * MIB).tag == "workspace"
    assert not before.parked


@pytest.mark.parametrize("kind", ["vllm", "no.such.module:make", "torpor.actors.config:nothing"])
def test_an_engine_that_is_not_there_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnknownEngine, match=kind):
        factory_of(kind)
