"""Makes metrics of one registry: the prefix, and the buckets of durations."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Making:
    """Labels are names of things there are few of, and never an id."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"torpor_{name}", text, labels, registry=self._registry)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """It is shown with `_total` behind its name."""
        return Counter(f"torpor_{name}", text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"torpor_{name}", text, labels, registry=self._registry, buckets=SECONDS)
