"""An event loop whose clock jumps to the next timer as soon as nothing else is to be done.

Work in threads (the journal's writer) is waited for in real time, and takes none of the loop's.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Asked to wait for a timer, it moves the clock instead, unless a thread is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0
        self.threads_busy: Callable[[], bool] = lambda: False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        if self.threads_busy():
            return super().select(0 if timeout <= 0 else None)
        # Nobody else can have done anything, and asking the kernel each time would take longer than all the rest.
        self.skipped_s += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Selector()
        super().__init__(self._jumping)
        self._jumping.threads_busy = lambda: self._at_work > 0
        self._at_work = 0

    def time(self) -> float:
        return self._jumping.skipped_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future = super().run_in_executor(executor, func, *args)
        self._at_work += 1
        future.add_done_callback(self._work_done)
        return future

    def _work_done(self, _: object) -> None:
        self._at_work -= 1


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
