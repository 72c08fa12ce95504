"""Which device each rank of a model works on: chosen by the coordinator, as plain data and one pure function.

A device is named as its driver does (a GPU by its UUID, never by an order in which somebody lists them), or
"host:<name>" for a host device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Place = tuple[str, str]  # node and device: host devices of two nodes may have one name


class NotSeated(Exception):
    """A model's ranks cannot have a device each; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank's process says of its node before it has touched a device."""

    node: str
    devices: tuple[str, ...]  # that it may work on
    given: str = ""  # the one that Ray has set aside for it, if any
    held: str = ""  # the one that it was told to take already


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's device. share: of the device, as Ray's bookkeeping has it."""

    rank: int
    node: str
    device: str
    share: float = 1.0

    @property
    def place(self) -> Place:
        return self.node, self.device


@dataclass(frozen=True, slots=True)
class Wish:
    """What a model wants. alone: its ranks never share a device. given_only: somebody else may have the others."""

    model: str
    share: float = 1.0
    alone: bool = False
    given_only: bool = False


def choose(wish: Wish, offers: Sequence[Offer], load: Mapping[Place, float]) -> tuple[Seat, ...]:
    """One seat for each offer, in their order. Raises NotSeated.

    load: shares that other models have. A rank that is not bound to one takes the device with the least load.
    """
    seats: list[Seat] = []
    for rank, offer in enumerate(offers):
        own = [seat.place for seat in seats]
        bound = offer.held or (offer.given if wish.given_only else "")
        free = [bound] if bound else _by_load(offer, own, load)
        if wish.given_only and not bound and len(free) > 1:
            raise NotSeated(
                f"model {wish.model!r}: its group lends no GPU to rank {rank}, and node {offer.node} has "
                f"{len(free)}; set gpus_per_rank to a share of a GPU that the group's owner leaves free, such as 0.1"
            )
        device = next((device for device in free if not wish.alone or (offer.node, device) not in own), None)
        if device is None:
            raise NotSeated(
                f"model {wish.model!r}: no GPU of its own for rank {rank} on node {offer.node}, which offers "
                f"{', '.join(offer.devices) or 'none'}; ranks of one model never share one: lower tensor_parallel, "
                "or give each rank a bundle with another GPU"
            )
        seats.append(Seat(rank, offer.node, device, wish.share))
    return tuple(seats)


def _by_load(offer: Offer, own: Sequence[Place], load: Mapping[Place, float]) -> list[str]:
    """The best first. Equal ones: what Ray has given, then in the node's order."""

    def worse(device: str) -> tuple[int, float, bool]:
        place = (offer.node, device)
        return own.count(place), load.get(place, 0.0), device != offer.given

    return sorted(offer.devices, key=worse)
