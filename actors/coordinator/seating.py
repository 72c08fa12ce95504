"""Who sits where: the devices that the coordinator has assigned, in its journal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence

from torpor.actors.coordinator.journal import Journal
from torpor.actors.messages import ModelView
from torpor.actors.seats import Offer, Place, Seat, Wish, choose


class Seating:
    """`open` it first. A model keeps its seats until `forget`, or until its ranks are new ones."""

    def __init__(self) -> None:
        self._journal: Journal | None = None
        self._seats: dict[str, tuple[Seat, ...]] = {}
        self._choosing = asyncio.Lock()  # two models that load at once must not choose by the same load

    async def open(self, journal: Journal, alive: Collection[str]) -> None:
        """Take up what a coordinator before this one has assigned to models that are still there."""
        self._journal = journal
        self._seats = {model: seats for model, seats in (await journal.seats()).items() if model in alive}

    async def take(self, wish: Wish, offers: Sequence[Offer]) -> tuple[Seat, ...]:
        """In the journal when this returns. Raises NotSeated."""
        assert self._journal is not None
        async with self._choosing:
            seats = choose(wish, offers, self._load(without=wish.model))
            if self._seats.get(wish.model) != seats:
                self._seats[wish.model] = seats
                await self._journal.write_seats(self._seats)
            return seats

    def forget(self, model: str) -> None:
        """Its ranks are gone. The journal loses it with the next change, or the next start."""
        self._seats.pop(model, None)

    def show(self, view: ModelView) -> ModelView:
        """With the devices that are assigned to its ranks."""
        view.devices = [seat.device for seat in self._seats.get(view.name, ())]
        return view

    def _load(self, without: str) -> dict[Place, float]:
        load: Counter[Place] = Counter()
        for model, seats in self._seats.items():
            for seat in seats if model != without else ():
                load[seat.place] += seat.share  # type: ignore[assignment]
        return dict(load)
