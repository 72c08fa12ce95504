"""Where the time of a first token, or of any step, goes: the engine's own calls, timed from outside.

Each part counts what is not within another one. What is left of the whole, mostly one thread waking another, is "rest".
On a GPU "gpu" is from the first kernel of a forward to the last, as the device's clock has it, and overlaps the others:
where it is about as long as "launch", the GPU waits for the CPU.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

# By object, as the engine holds them, and method.
CALLS = {
    ("engine", "prepare"): "prepare",
    ("engine", "submit"): "prepare",
    ("scheduler", "schedule"): "schedule",
    ("book", "create"): "prefix lookup",
    ("book", "resume"): "pages back",
    ("book", "resize"): "pages made",
    ("book", "tables"): "inputs",
    ("pages", "batch"): "inputs",
    ("inputs", "fill"): "inputs",
    ("runner", "_forward"): "launch",
    ("runner", "_synchronize"): "wait for the GPU",
    ("book", "commit"): "commit",
    ("book", "snapshot"): "commit",
    ("scheduler", "complete"): "events",
    ("loop", "_give_out"): "events",
}
PARTS = (*dict.fromkeys(CALLS.values()), "sampling")


class Parts:
    """Watches the leader of a Served for good."""

    def __init__(self, host: Any, now: Callable[[], float] = time.perf_counter) -> None:
        loop = host.engine._loop
        runner = loop._runner
        holders = {
            "engine": host.engine,
            "loop": loop,
            "scheduler": loop._scheduler,
            "book": loop._book,
            "runner": runner,
            "pages": runner._pages,
            "inputs": runner._graphs._inputs if runner._graphs is not None else None,
        }
        self._host, self._now = host, now
        self._within = threading.local()  # seconds of inner parts, by nesting
        self._seconds: dict[str, float] = defaultdict(float)
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for (holder, method), name in CALLS.items():
            if (owner := holders[holder]) is not None:
                setattr(owner, method, self._timed(getattr(owner, method), name))
        if torch.cuda.is_available() and runner._pages.device.type == "cuda":
            runner._forward = self._marked(runner._forward)
        loop._scheduler.complete = self._sampling(loop._scheduler.complete)

    def ask(self, prompt: list[int], tokens: int) -> tuple[float, list[int], int, dict[str, float]]:
        """As Served.first_token, and the seconds by part until that token. Nothing else may run meanwhile."""
        taken: dict[str, float] = {}
        self._seconds.clear()
        self._marks.clear()

        def first() -> None:
            taken.update({name: self._seconds.get(name, 0.0) for name in PARTS})
            taken["gpu"] = float(len(self._marks))

        self._host.on_first = first
        try:
            seconds, answer, known = self._host.first_token(prompt, tokens)
        finally:
            self._host.on_first = None
        forwards = int(taken.pop("gpu"))
        taken["rest"] = seconds - sum(taken.values())
        if forwards:
            torch.cuda.synchronize()
            marks = self._marks[:forwards]
            taken["gpu"] = sum(begin.elapsed_time(end) for begin, end in marks) / 1e3
        return seconds, answer, known, taken

    def while_doing(self, work: Callable[[], None]) -> dict[str, float]:
        """Seconds by part of whatever the engine does meanwhile, with "rest", and "gpu" where there is one."""
        self._seconds.clear()
        self._marks.clear()
        began = self._now()
        work()
        whole = self._now() - began
        taken = {name: self._seconds.get(name, 0.0) for name in PARTS}
        taken["rest"] = whole - sum(taken.values())
        if self._marks:
            torch.cuda.synchronize()
            taken["gpu"] = sum(begin.elapsed_time(end) for begin, end in self._marks) / 1e3
        return taken

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            outer = getattr(self._within, "seconds", 0.0)
            self._within.seconds = 0.0
            began = self._now()
            try:
                return call(*arguments, **keywords)
            finally:
                whole = self._now() - began
                self._seconds[name] += whole - self._within.seconds
                self._within.seconds = outer + whole

        return timed

    def _marked(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*arguments: Any) -> Any:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            result = forward(*arguments)
            last.record()
            self._marks.append((first, last))
            return result

        return marked

    def _sampling(self, complete: Callable[..., Any]) -> Callable[..., Any]:
        return lambda chunks, choose: complete(chunks, self._timed(choose, "sampling"))
