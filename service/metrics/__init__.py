"""What Prometheus scrapes, by noun: models and their ranks, operations, requests; `Metrics` is all of it."""

from torpor.service.metrics.whole import Metrics

__all__ = ["Metrics"]
