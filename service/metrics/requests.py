"""Requests of this front end: admissions, waiting, tokens, refusals for a limit."""

from __future__ import annotations

from torpor.actors.messages import TokenEvent
from torpor.service.metrics.making import Making


class RequestMetrics:
    def __init__(self, making: Making) -> None:
        counter, gauge = making.counter, making.gauge
        self._admissions = counter(
            "admissions", "Requests by what the gate said", "model", "result", "reason"
        )
        self._limited = counter("limited_requests", "Requests refused for a limit of this front end", "limit")
        self._open = gauge("open_requests", "Admitted requests that have not ended", "model")
        self._waiting = gauge("queue_length", "Requests that wait at the gate", "model")
        self._wait_s = making.histogram(
            "queue_wait_seconds", "From a request's arrival to its admission, of those that waited", "model"
        )
        self._prompt = counter("prompt_tokens", "Tokens of prompts of ended requests", "model")
        self._hit = counter("prefix_hit_tokens", "Those of them that were found computed", "model")
        self._lookups = counter("prefix_lookups", "Ended requests by what they found", "model", "result")
        self._completed = counter("completion_tokens", "Tokens that ended requests were given", "model")

    def count_admission(self, model: str, result: str, reason: str) -> None:
        self._admissions.labels(model, result, reason).inc()

    def count_open(self, model: str, change: int) -> None:
        self._open.labels(model).inc(change)

    def count_waiting(self, model: str, change: int) -> None:
        self._waiting.labels(model).inc(change)

    def observe_wait(self, model: str, seconds: float) -> None:
        self._wait_s.labels(model).observe(seconds)

    def count_limited(self, limit: str) -> None:
        self._limited.labels(limit).inc()

    def count_end(self, model: str, last: TokenEvent) -> None:
        """last: the event with which its request has ended; one that says nothing of its prompt counts for nothing."""
        if not last.prompt_tokens:
            return
        self._prompt.labels(model).inc(last.prompt_tokens)
        self._hit.labels(model).inc(last.cached_tokens)
        self._lookups.labels(model, "hit" if last.cached_tokens else "miss").inc()
        self._completed.labels(model).inc(last.completion_tokens)
