"""All metrics of one front end, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest

from torpor.actors.messages import ModelView, Operation
from torpor.service.metrics.making import Making
from torpor.service.metrics.models import ModelMetrics
from torpor.service.metrics.operations import OperationMetrics
from torpor.service.metrics.requests import RequestMetrics


class Metrics(RequestMetrics):
    """Gauges are set anew by every scrape, which asks ranks for status and wakes nothing; counters grow.

    since: Unix time from which on operations are counted.
    """

    def __init__(self, since: float = 0.0) -> None:
        self.registry = CollectorRegistry()
        self._making = Making(self.registry)
        super().__init__(self._making)
        self._models = ModelMetrics(self._making)
        self._operations = OperationMetrics(self._making, since)
        self._epoch = self._making.gauge("coordinator_epoch", "Rises whenever the coordinator begins anew")

    def watch_tokens_file(self, is_broken: Callable[[], bool]) -> None:
        text = "1 while the tokens file cannot be used, and the tokens of before are in force"
        self._making.gauge("tokens_file_broken", text).set_function(is_broken)

    def show_models(self, views: Iterable[ModelView]) -> None:
        self._models.show(views)

    def show_epoch(self, epoch: int) -> None:
        self._epoch.set(epoch)

    def count_operations(self, operations: Iterable[Operation]) -> None:
        self._operations.count(operations)

    def text(self) -> bytes:
        return generate_latest(self.registry)
