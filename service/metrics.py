"""What Prometheus scrapes, in a registry of the app's own. Reading asks ranks for status, and wakes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from torpor.actors.messages import ModelState, ModelView, Operation, OperationState
from torpor.service.wire import TIERS, memory_by_tag

_SEEN_OPERATIONS = 10_000
_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """Gauges are set anew by every scrape; counters and histograms grow."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seen: OrderedDict[str, None] = OrderedDict()
        rank = ["model", "rank", "device"]
        self._memory = self._gauge("memory_bytes", "Memory by tag and tier", [*rank, "tag", "tier"])
        self._free = self._gauge("device_free_bytes", "Free bytes as the driver sees them", rank)
        self._total = self._gauge("device_total_bytes", "Bytes of the device", rank)
        self._sequences = self._gauge("live_sequences", "Sequences that hold pages", ["model", "rank"])
        self._prefix = self._gauge("prefix_tokens", "Tokens of reusable prefixes", ["model", "rank"])
        self._state = self._gauge("model_state", "1 for the state that a model is in", ["model", "state"])
        self._gate = self._gauge("gate_open", "1 when the model admits requests", ["model"])
        self._held = self._gauge("model_held", "1 while a hold keeps the model asleep", ["model"])
        self._version = self._gauge("weights_version", "Version of the published weights", ["model"])
        self._gauges = (
            *(self._memory, self._free, self._total, self._sequences, self._prefix),
            *(self._state, self._gate, self._held, self._version),
        )
        self._admissions = Counter(
            "torpor_admissions",
            "Requests by what the gate said",
            ["model", "result", "reason"],
            registry=self.registry,
        )
        self._limited = Counter(
            "torpor_limited_requests",
            "Requests refused for a limit of this front end",
            ["limit"],
            registry=self.registry,
        )
        self._open = self._gauge("open_requests", "Admitted requests that have not ended", ["model"])
        self._waiting = self._gauge("queue_length", "Requests that wait at the gate", ["model"])
        self._wait_s = Histogram(
            "torpor_queue_wait_seconds",
            "From a request's arrival to its admission, of those that waited",
            ["model"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._operations = Counter(
            "torpor_operations", "Finished operations", ["model", "kind", "outcome"], registry=self.registry
        )
        self._moved = Counter(
            "torpor_phase_bytes",
            "Bytes that phases moved",
            ["model", "kind", "phase"],
            registry=self.registry,
        )
        self._operation_s = Histogram(
            "torpor_operation_duration_seconds",
            "From request to outcome",
            ["model", "kind", "outcome"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._phase_s = Histogram(
            "torpor_operation_phase_duration_seconds",
            "Time in one phase",
            ["model", "kind", "phase"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def _gauge(self, name: str, text: str, labels: list[str]) -> Gauge:
        return Gauge(f"torpor_{name}", text, labels, registry=self.registry)

    def count_admission(self, model: str, result: str, reason: str) -> None:
        self._admissions.labels(model, result, reason).inc()

    def count_limited(self, limit: str) -> None:
        self._limited.labels(limit).inc()

    def count_open(self, model: str, change: int) -> None:
        self._open.labels(model).inc(change)

    def count_waiting(self, model: str, change: int) -> None:
        self._waiting.labels(model).inc(change)

    def observe_wait(self, model: str, seconds: float) -> None:
        self._wait_s.labels(model).observe(seconds)

    def show_models(self, views: Iterable[ModelView]) -> None:
        for gauge in self._gauges:
            gauge.clear()
        for view in views:
            for state in ModelState:
                self._state.labels(view.name, state.value).set(view.state is state)
            self._gate.labels(view.name).set(view.gate_open)
            self._held.labels(view.name).set(view.hold)
            self._version.labels(view.name).set(view.weights_version)
            for status in view.ranks:
                rank = (view.name, str(status.rank))
                device = (*rank, status.device_id)
                self._free.labels(*device).set(status.device_free_bytes)
                self._total.labels(*device).set(status.device_total_bytes)
                self._sequences.labels(*rank).set(status.live_sequences)
                self._prefix.labels(*rank).set(status.prefix_tokens)
                for row in memory_by_tag(status):
                    for tier in TIERS:
                        self._memory.labels(*device, row["tag"], tier).set(row[f"{tier}_bytes"])

    def count_operations(self, operations: Iterable[Operation]) -> None:
        """Each finished operation once, however often it is listed."""
        for operation in operations:
            if operation.state is OperationState.RUNNING or operation.dry_run or operation.id in self._seen:
                continue
            self._seen[operation.id] = None
            if len(self._seen) > _SEEN_OPERATIONS:
                self._seen.popitem(last=False)
            labels = (operation.model, str(operation.kind), str(operation.state))
            self._operations.labels(*labels).inc()
            if operation.finished_at is not None:
                self._operation_s.labels(*labels).observe(
                    max(0.0, operation.finished_at - operation.created_at)
                )
            for phase in operation.phases:
                where = (operation.model, str(operation.kind), str(phase.name))
                self._phase_s.labels(*where).observe(phase.seconds)
                self._moved.labels(*where).inc(max(0, phase.bytes))

    def text(self) -> bytes:
        return generate_latest(self.registry)
