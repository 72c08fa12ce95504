"""Models and their ranks as gauges, set anew by every scrape."""

from __future__ import annotations

from collections.abc import Iterable

from torpor.actors.messages import LedgerPhase, ModelState, ModelView, RankStatus
from torpor.service.metrics.making import Making
from torpor.service.wire import TIERS, memory_by_tag

_UNDECIDED = (LedgerPhase.STAGED, LedgerPhase.COMMITTING)


class ModelMetrics:
    """`restarts` alone is a counter: of the incarnations that this front end has seen come after others."""

    def __init__(self, making: Making) -> None:
        gauge = making.gauge
        rank = ("model", "rank", "device")
        self._memory = gauge("memory_bytes", "Memory by tag and tier", *rank, "tag", "tier")
        self._free = gauge("device_free_bytes", "Free bytes as the driver sees them", *rank)
        self._total = gauge("device_total_bytes", "Bytes of the device", *rank)
        self._sequences = gauge("live_sequences", "Sequences that hold pages", "model", "rank")
        self._prefix = gauge("prefix_tokens", "Tokens of reusable prefixes", "model", "rank")
        self._up = gauge("rank_up", "1 when the rank is loaded and answers", "model", "rank")
        self._state = gauge("model_state", "1 for the state that a model is in", "model", "state")
        self._gate = gauge("gate_open", "1 when the model admits requests", "model")
        self._held = gauge("model_held", "1 while a hold keeps the model asleep", "model")
        self._version = gauge("weights_version", "Version of the published weights", "model")
        self._doubt = gauge("ranks_in_doubt", "Ranks of which nobody knows where they stand", "model")
        self._gauges = (
            *(self._memory, self._free, self._total, self._sequences, self._prefix, self._up),
            *(self._state, self._gate, self._held, self._version, self._doubt),
        )
        self._restarts = making.counter("rank_restarts", "Ranks that came after others", "model", "rank")
        self._incarnations: dict[tuple[str, str], str] = {}

    def show(self, views: Iterable[ModelView]) -> None:
        for gauge in self._gauges:
            gauge.clear()
        for view in views:
            for state in ModelState:
                self._state.labels(view.name, state.value).set(view.state is state)
            self._gate.labels(view.name).set(view.gate_open)
            self._held.labels(view.name).set(view.hold)
            self._version.labels(view.name).set(
                float("nan") if view.weights_version is None else view.weights_version
            )
            self._doubt.labels(view.name).set(sum(is_in_doubt(view, status) for status in view.ranks))
            for status in view.ranks:
                self._show_rank(view, status)

    def _show_rank(self, view: ModelView, status: RankStatus) -> None:
        rank = (view.name, str(status.rank))
        self._up.labels(*rank).set(status.loaded and not status.error)
        self._count_incarnation(rank, status.incarnation)
        if status.error and not status.memory:
            return  # nothing is known of it: no number is better than a wrong one
        device = (*rank, status.device_id)
        self._free.labels(*device).set(status.device_free_bytes)
        self._total.labels(*device).set(status.device_total_bytes)
        self._sequences.labels(*rank).set(status.live_sequences)
        self._prefix.labels(*rank).set(status.prefix_tokens)
        for row in memory_by_tag(status):
            for tier in TIERS:
                self._memory.labels(*device, row["tag"], tier).set(row[f"{tier}_bytes"])

    def _count_incarnation(self, rank: tuple[str, str], incarnation: str) -> None:
        restarts = self._restarts.labels(*rank)
        if not incarnation:
            return
        known = self._incarnations.setdefault(rank, incarnation)
        if known != incarnation:
            self._incarnations[rank] = incarnation
            restarts.inc()


def is_in_doubt(view: ModelView, status: RankStatus) -> bool:
    """It does not answer though it may live, or waits for a decision of an operation that nobody carries out."""
    return status.error.startswith("unknown") or (
        status.ledger_phase in _UNDECIDED and view.operation is None
    )
