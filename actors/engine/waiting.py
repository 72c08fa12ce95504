"""Waiting for a GPU that may wait for other ranks: with an end, unlike the driver's own way (F24)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from torpor.actors.engine.errors import StepLoopDied

LOOK_S = 20e-6  # a step takes milliseconds


def until_computed(device: torch.device, timeout_s: float) -> None:
    """Until what this thread's stream was given is done. Raises StepLoopDied: some rank has left the others alone."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    wait_for(event.query, timeout_s)
    torch.cuda.synchronize(device)


def wait_for(done: Callable[[], bool], timeout_s: float) -> None:
    """Raises StepLoopDied."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() >= deadline:
            raise StepLoopDied(
                f"the GPU was not ready within {timeout_s:g} s: another rank did not take its part of the step's sums"
            )
        time.sleep(LOOK_S)
