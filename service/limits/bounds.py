"""The bounds as plain data."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one front end. requests_per_s and burst are each caller's: of a token, or of an address without one."""

    body_bytes: int = 16 * MIB  # the longest prompts are far below
    body_timeout_s: float = 30.0  # to send it
    inference_requests: int = 1024  # at once, those that wait at gates included
    control_requests: int = 256  # all others at once: what wakes a model has room also while it is asked much
    event_streams: int = 64
    requests_per_s: float | None = 1000.0  # None: as fast as they like
    burst: int = 2000
