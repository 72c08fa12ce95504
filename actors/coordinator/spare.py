"""Host memory that models keep for speed only, given back where a sleep would be refused for want of it (M8).

That is idle memory and the backups of models that are awake: their next sleep copies again. What a sleeping model
keeps is not touched.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from torpor.actors.coordinator.asking import trim_ranks
from torpor.actors.coordinator.budget import Place
from torpor.actors.coordinator.claims import Claims
from torpor.actors.coordinator.runtime import ModelRuntime
from torpor.actors.messages import RankStatus

log = logging.getLogger(__name__)
Lacking = Mapping[Place, int]  # bytes by place


class Spare:
    def __init__(self, models: Mapping[str, ModelRuntime], claims: Claims) -> None:
        self._models = models
        self._claims = claims

    async def give_back(self, wanting: ModelRuntime, lacking: Callable[[], Lacking]) -> None:
        """By one model after the other, those with most idle memory first, until no host memory is lacking.

        Only by their ranks on nodes where it lacks.
        Its own is not asked for: a sleep reuses it. A model with an operation of its own is left alone.
        """
        asked = {wanting}
        while nodes := {place.node for place in lacking() if not place.device and not place.disk}:
            others = [one for one in self._models.values() if one not in asked and _could(one, nodes)]
            if not others:
                return
            chosen = max(others, key=lambda one: sum(s.host_idle_bytes for s in _on(one, nodes)))
            asked.add(chosen)
            await self._trim(chosen, nodes)

    def covers(self, wanting: ModelRuntime, lacking: Lacking) -> bool:
        """Whether giving it all back would make room for all that is lacking, as far as ranks have told.

        An awake cache's host memory may be its cold pages, which nobody drops: it is not counted on.
        """
        there: Counter[Place] = Counter()
        nodes = {place.node for place in lacking}
        for one in self._models.values():
            if one is not wanting and _could(one, nodes):
                for status in _on(one, nodes):
                    there[Place(status.node)] += status.host_idle_bytes + _host_bytes(status, "weights")
        return all(size <= there[place] for place, size in lacking.items())

    async def _trim(self, runtime: ModelRuntime, nodes: set[str]) -> None:
        before = self._claims.kept_bytes()
        answers = await trim_ranks(runtime, 0, {status.rank for status in _on(runtime, nodes)})
        after = self._claims.kept_bytes()
        for place, kept in before.items():
            if not place.disk:
                self._claims.budget.gave_back(place, max(0, kept - after[place]))
        log.info(
            "%s gave back %d bytes of host memory that it kept for speed, for another's sleep",
            runtime.config.name,
            sum(answer.freed_bytes for answer in answers),
        )


def _could(runtime: ModelRuntime, nodes: set[str]) -> bool:
    """Whether it may keep something on these nodes that it could do without."""
    return runtime.running is None and any(
        status.host_idle_bytes or _host_bytes(status) for status in _on(runtime, nodes)
    )


def _host_bytes(status: RankStatus, tag: str | None = None) -> int:
    """Beside what is awake; of one tag, or of all."""
    rows = (row for row in status.memory if not row.get("parked") and tag in (None, row["tag"]))
    return sum(int(str(row.get("host_bytes", 0))) for row in rows)


def _on(runtime: ModelRuntime, nodes: set[str]) -> list[RankStatus]:
    return [status for status in runtime.statuses.values() if status.node in nodes]
