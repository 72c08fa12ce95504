"""What a rank's node offers, before anything touches a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ranks.bench import spec

from torpor.actors.rank.device import DeviceUnusable
from torpor.actors.rank.offer import cuda_offer, list_gpus, offer_of
from torpor.actors.seats import Offer

LISTED = ["GPU-x", "GPU-y", "GPU-z"]


def test_what_ray_set_aside_is_told_as_a_uuid() -> None:
    assert cuda_offer("n", LISTED, ["1"], managed=3).given == "GPU-y"
    assert cuda_offer("n", LISTED, ["GPU-z"], managed=3).given == "GPU-z"
    assert cuda_offer("n", LISTED, [], managed=3).devices == tuple(LISTED)


def test_where_ray_has_fewer_gpus_than_there_are_only_its_own_is_offered() -> None:
    assert cuda_offer("n", LISTED, ["1"], managed=2).devices == ("GPU-y",)


def test_a_rank_that_has_its_device_offers_it_also_where_nothing_can_be_listed(device_name: str) -> None:
    """A coordinator that comes back asks every rank: one that serves must not fail for it."""

    def broken() -> Offer:
        raise DeviceUnusable("nvidia-smi does not answer")

    host = spec(device_name)
    cuda = replace(host, device=replace(host.device, kind="cuda"))
    assert offer_of(cuda, "n", "GPU-y", broken) == Offer("n", ("GPU-y",), held="GPU-y")
    with pytest.raises(DeviceUnusable):
        offer_of(cuda, "n", "", broken)
    assert offer_of(host, "n", "", broken).devices[0] == f"host:{device_name}-0"


def test_a_gpu_that_is_not_there_is_told() -> None:
    with pytest.raises(
        DeviceUnusable, match="Ray has set GPU 7 aside, and nvidia-smi lists 3; check CUDA_VIS"
    ):
        cuda_offer("n", LISTED, ["7"], managed=3)


def test_a_node_whose_driver_lists_nothing_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceUnusable, match=r"does not list.*check the driver, or set device\.kind to host"):
        list_gpus()
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho GPU-x\necho GPU-y\n")
    fake.chmod(0o755)
    assert list_gpus() == ["GPU-x", "GPU-y"]
