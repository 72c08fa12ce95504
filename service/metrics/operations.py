"""Operations as counters and histograms: each finished one once, however often it is listed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from torpor.actors.messages import Operation, OperationState
from torpor.service.metrics.making import Making

_SEEN_OPERATIONS = 10_000


class OperationMetrics:
    """Those that ended before `since` (Unix time) are not counted: a front end that begins anew must not count twice
    what the one before it has counted.
    """

    def __init__(self, making: Making, since: float) -> None:
        self._since = since
        self._seen: OrderedDict[str, None] = OrderedDict()
        ends, phases = ("model", "kind", "outcome"), ("model", "kind", "phase")
        self._operations = making.counter("operations", "Finished operations", *ends)
        self._moved = making.counter("phase_bytes", "Bytes that phases moved", *phases)
        self._operation_s = making.histogram("operation_duration_seconds", "From request to outcome", *ends)
        self._phase_s = making.histogram("operation_phase_duration_seconds", "Time in one phase", *phases)
        self._lost = making.counter("prefix_tokens_lost", "Prefix tokens dropped by operations", "model")

    def count(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            ended = operation.finished_at
            if operation.state is OperationState.RUNNING or operation.dry_run or operation.id in self._seen:
                continue
            if ended is None or ended < self._since:
                continue
            self._seen[operation.id] = None
            if len(self._seen) > _SEEN_OPERATIONS:
                self._seen.popitem(last=False)
            self._count_one(operation, max(0.0, ended - operation.created_at))

    def _count_one(self, operation: Operation, seconds: float) -> None:
        labels = (operation.model, str(operation.kind), str(operation.state))
        self._operations.labels(*labels).inc()
        self._operation_s.labels(*labels).observe(seconds)
        self._lost.labels(operation.model).inc(operation.prefix_tokens_lost)
        for phase in operation.phases:
            where = (operation.model, str(operation.kind), str(phase.name))
            self._phase_s.labels(*where).observe(phase.seconds)
            self._moved.labels(*where).inc(max(0, phase.bytes))
