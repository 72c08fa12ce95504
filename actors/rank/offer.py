"""What a rank's node has in devices, told without touching any: CUDA would fix its choice at the first touch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from torpor.actors.config import RankSpec
from torpor.actors.rank.device import DeviceUnusable
from torpor.actors.seats import Offer

HOST_PREFIX = "host:"
_LIST_GPUS = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
_LIST_S = 30


def offer_of(spec: RankSpec, node: str, held: str, gpus: Callable[[], Offer]) -> Offer:
    """held: what the rank was told to take. Nobody is asked about others then: a rank that serves must not end
    because its node's tools do not answer. gpus: as `cuda_offer` says, where the rank wants one.
    """
    if held:
        return Offer(node, (held,), held=held)
    return host_offer(spec, node) if spec.device.kind == "host" else gpus()


def host_offer(spec: RankSpec, node: str) -> Offer:
    names = [f"{HOST_PREFIX}{spec.device.name}-{index}" for index in range(spec.device.count)]
    return Offer(node, tuple(names))


def cuda_offer(node: str, listed: Sequence[str], ids: Sequence[str], managed: int) -> Offer:
    """listed: UUIDs in the driver's order; ids: what Ray set aside; managed: how many GPUs of the node Ray has.

    Where Ray has fewer than there are, the others are somebody else's, and nobody says which: only what it has
    set aside is offered. Raises DeviceUnusable.
    """
    given = [_uuid(listed, name) for name in ids]
    devices = tuple(listed) if managed >= len(listed) else tuple(given)
    return Offer(node, devices, given[0] if given else "")


def list_gpus() -> list[str]:
    """UUIDs of this machine's GPUs, whatever CUDA_VISIBLE_DEVICES says. Raises DeviceUnusable."""
    try:
        done = subprocess.run(_LIST_GPUS, capture_output=True, text=True, timeout=_LIST_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceUnusable(
            f"nvidia-smi does not list the GPUs of this node ({error}); check the driver, or set device.kind to host"
        ) from error
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _uuid(listed: Sequence[str], name: str) -> str:
    if not name.isdigit():
        return name  # Ray was started with UUIDs
    if int(name) < len(listed):
        return listed[int(name)]
    raise DeviceUnusable(
        f"Ray has set GPU {name} aside, and nvidia-smi lists {len(listed)}; check CUDA_VISIBLE_DEVICES of its node"
    )
