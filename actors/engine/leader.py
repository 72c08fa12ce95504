"""The leader's step loop: it takes requests, schedules, tells the followers, runs, samples, and hands out text."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

import torch

from torpor.actors.engine.channel import LeaderChannel
from torpor.actors.engine.errors import StepLoopDied
from torpor.actors.engine.plan import Farewell, Pause, Proceed, StepPlan
from torpor.actors.engine.protocol import EventSink, InvalidPrompt
from torpor.actors.engine.request import Request
from torpor.actors.engine.runner import ModelRunner
from torpor.actors.engine.sampling import Chosen, Likeliest
from torpor.actors.engine.scheduler import Scheduler
from torpor.actors.engine.sequences import SequenceBook
from torpor.actors.messages import FinishReason, TokenEvent
from torpor.actors.ports import QueueFull


class LeaderLoop:
    """One thread steps; every other method may be called from any thread and never waits for a step."""

    def __init__(
        self,
        scheduler: Scheduler,
        book: SequenceBook,
        runner: ModelRunner,
        channel: LeaderChannel,
        max_waiting: int,
        synchronize: Callable[[], None],
        leave_group: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._book = book
        self._runner = runner
        self._channel = channel
        self._max_waiting = max_waiting
        self._synchronize = synchronize
        self._leave_group = leave_group
        self._sink: EventSink | None = None
        self._thread = threading.Thread(target=self._run, name="torpor-steps", daemon=True)
        self._changed = threading.Condition()
        # Below: guarded by _changed.
        self._live: dict[str, Request] = {}  # submitted, and their last event not yet given out
        self._arrivals: list[Request] = []
        self._cancels: list[str] = []
        self._next_key = 0
        self._pause_wanted = False
        self._paused = False
        self._anew = False  # the weights are others than those that K and V were computed by
        self._reap_allowed = False
        self._reaping = False
        self._closing = False
        self._error = ""
        self._number = 0

    def start(self, sink: EventSink) -> None:
        self._sink = sink
        self._thread.start()

    def submit(self, request: Request) -> None:
        with self._changed:
            if self._error:
                raise StepLoopDied(self._error)
            if request.id in self._live:
                raise InvalidPrompt(f"a request with the id {request.id!r} is running; ids must be unique")
            if self._count_waiting() >= self._max_waiting:
                raise QueueFull(f"{self._max_waiting} requests wait already; try again later")
            request.key, self._next_key = self._next_key, self._next_key + 1
            self._live[request.id] = request
            self._arrivals.append(request)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._live and request_id not in self._cancels:
                self._cancels.append(request_id)
                self._changed.notify_all()

    def running(self) -> int:
        with self._changed:
            return len(self._live)

    def waiting(self) -> int:
        with self._changed:
            return self._count_waiting()

    def quiesce(self, timeout_s: float) -> int:
        with self._changed:
            self._pause_wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._paused or self._error, timeout_s)
            if self._error:
                raise StepLoopDied(self._error)
            if not self._paused:
                self._pause_wanted = False
                raise TimeoutError(f"the running step did not end within {timeout_s:g} s")
            return self._number

    def resume(self) -> None:
        with self._changed:
            self._pause_wanted = False
            self._changed.notify_all()

    def compute_anew(self) -> None:
        """At rest: when it goes on, nothing that was computed so far is used any more."""
        with self._changed:
            self._anew = True

    def reap(self, allowed: bool) -> None:
        with self._changed:
            self._reap_allowed = allowed
            self._changed.notify_all()
            # Ends with its messages to the followers, which have a time-out.
            self._changed.wait_for(lambda: allowed or not self._reaping or bool(self._error))

    def error(self) -> str:
        with self._changed:
            return self._error

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._channel.close()

    def _count_waiting(self) -> int:
        return sum(not request.begun for request in self._live.values())

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._end_all("the engine was closed")
            self._flush()
            self._channel.send(Farewell())
        except BaseException as error:
            self._die(error)

    def _turn(self) -> bool:
        """Wait for something to do and do it once. False when the loop is to end."""
        with self._changed:
            self._changed.wait_for(self._has_turn)
            if self._closing:
                return False
            pause, proceed = self._pause_wanted and not self._paused, self._paused and not self._pause_wanted
            self._reaping = reaping = self._paused and not proceed
            anew = proceed and self._anew
            self._anew = self._anew and not proceed
            arrivals: list[Request] = []
            cancels: list[str] = []
            if not pause and not proceed:
                arrivals, self._arrivals = self._arrivals, []
                cancels, self._cancels = self._cancels, []
        if pause:
            self._scheduler.park()
            self._flush()
            self._channel.send(Pause(self._number))
            self._synchronize()
        elif proceed:
            self._scheduler.thaw(anew)
            self._channel.send(Proceed())
        elif reaping:
            self._reap(arrivals, cancels)
        if pause or proceed:
            with self._changed:
                self._paused = pause
                self._changed.notify_all()
        elif not reaping:
            self._step(arrivals, cancels)
        return True

    def _has_turn(self) -> bool:
        if self._closing or self._pause_wanted != self._paused:
            return True
        if self._paused:
            return self._reap_allowed and bool(self._cancels)
        return bool(self._arrivals or self._cancels or len(self._scheduler))

    def _take_in(self, arrivals: list[Request], cancels: list[str]) -> list[TokenEvent]:
        for request in arrivals:
            self._scheduler.add(request)
        return self._scheduler.cancel(cancels)

    def _reap(self, arrivals: list[Request], cancels: list[str]) -> None:
        """Between two steps, at rest: end the cancelled ones here and let their sequences go on every rank."""
        events = self._take_in(arrivals, cancels)
        self._flush()
        self._give_out(events)
        with self._changed:
            self._reaping = False
            self._changed.notify_all()

    def _step(self, arrivals: list[Request], cancels: list[str]) -> None:
        events = self._take_in(arrivals, cancels)
        chunks, ended = self._scheduler.schedule()
        events += ended
        if chunks:
            self._number += 1
            self._channel.send(StepPlan(self._number, self._book.take_log(), tuple(chunks)))
            self._channel.go()
            logits = self._runner.forward(chunks)
            likeliest = None if logits is None else Likeliest(logits)

            def choose(request: Request, index: int) -> Chosen:
                assert logits is not None and likeliest is not None
                if request.sampler.is_greedy:
                    return Chosen(likeliest[index])
                return request.sampler.choose(logits[index], request.output)

            with torch.inference_mode():
                events += self._scheduler.complete(chunks, choose)
        if any(event.finish_reason for event in events):
            self._flush()  # before anybody hears of the end: a drain then finds all ranks alike
        self._give_out(events)

    def _flush(self) -> None:
        """Tell the followers what happened since the last plan."""
        operations = self._book.take_log()
        if operations:
            self._channel.send(StepPlan(self._number, operations))

    def _give_out(self, events: list[TokenEvent]) -> None:
        assert self._sink is not None
        if events:
            self._sink(events)
        with self._changed:
            for event in events:
                if event.finish_reason is not None:
                    self._live.pop(event.request, None)
            self._changed.notify_all()

    def _end_all(self, why: str) -> None:
        with self._changed:
            live = list(self._live.values())  # whoever is in it has not heard of an end yet
        self._give_out([request.end(FinishReason.ERROR, why) for request in live])
        self._book.close_all()

    def _die(self, error: BaseException) -> None:
        """Fail stop: the loop ends, every request hears of it, and the followers lose their leader.

        Leaving the process group ends what other ranks wait for in a collective.
        """
        text = "".join(traceback.format_exception_only(error)).strip()
        traceback.print_exception(error)
        with self._changed:
            self._error = f"the step loop died in step {self._number}: {text}"
            self._paused = False
            self._changed.notify_all()
        try:
            self._end_all(self._error)
        finally:
            self._channel.close()
            self._leave_group()
