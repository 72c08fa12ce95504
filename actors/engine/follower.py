"""A follower's step loop: it does what the leader's plans say, and checks that it got where the leader is."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

from torpor.actors.engine.channel import FollowerChannel
from torpor.actors.engine.errors import RanksDisagree, StepLoopDied
from torpor.actors.engine.plan import Farewell, Go, Message, Pause, StepPlan
from torpor.actors.engine.runner import ModelRunner
from torpor.actors.engine.sequences import SequenceBook

GO_TIMEOUT_S = 120.0
POLL_S = 0.5  # how soon a close is noticed; messages are noticed at once


class FollowerLoop:
    """It stops where the leader stopped, and takes no further step until its own `resume`."""

    def __init__(
        self,
        book: SequenceBook,
        runner: ModelRunner,
        channel: FollowerChannel,
        synchronize: Callable[[], None],
        leave_group: Callable[[], None],
    ) -> None:
        self._book = book
        self._runner = runner
        self._channel = channel
        self._synchronize = synchronize
        self._leave_group = leave_group
        self._thread = threading.Thread(target=self._run, name="torpor-steps", daemon=True)
        self._changed = threading.Condition()
        # Below: guarded by _changed.
        self._wanted = False  # a quiesce was asked for here
        self._leader_paused = False
        self._stopped = False  # both were true at once; until `resume`
        self._closing = False
        self._error = ""
        self._number = 0

    def start(self) -> None:
        self._thread.start()

    def quiesce(self, timeout_s: float) -> int:
        with self._changed:
            self._wanted = True
            self._stopped |= self._leader_paused
            self._changed.wait_for(lambda: self._stopped or self._error, timeout_s)
            if self._error:
                raise StepLoopDied(self._error)
            if not self._stopped:
                self._wanted = False
                raise TimeoutError(f"the leader did not stop between two steps within {timeout_s:g} s")
            return self._number

    def resume(self) -> None:
        with self._changed:
            self._wanted = self._stopped = False
            self._changed.notify_all()

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

    def _run(self) -> None:
        try:
            while not self._closing:
                message = self._channel.receive(POLL_S)
                if message is not None and not self._handle(message):
                    break
            self._book.close_all()
        except BaseException as error:
            traceback.print_exception(error)
            text = "".join(traceback.format_exception_only(error)).strip()
            with self._changed:
                self._error = f"the step loop died after step {self._number}: {text}"
                self._changed.notify_all()
            self._channel.close()
            self._leave_group()  # ends what other ranks wait for in a collective

    def _handle(self, message: Message) -> bool:
        if isinstance(message, StepPlan):
            return self._follow(message)
        if isinstance(message, Pause):
            self._synchronize()
        problem = ""
        with self._changed:
            if isinstance(message, Pause) and message.number != self._number:
                problem = f"the leader stopped after step {message.number}, this rank after {self._number}"
            self._leader_paused = isinstance(message, Pause)
            self._stopped |= self._wanted and self._leader_paused
            self._changed.notify_all()
        self._channel.acknowledge(problem)
        return not isinstance(message, Farewell)

    def _follow(self, plan: StepPlan) -> bool:
        """Replay, acknowledge, run. A plan that comes while this rank is stopped waits for `resume`.

        But for one that only lets sequences go: the leader sends it at rest, too.
        """
        with self._changed:
            self._changed.wait_for(lambda: plan.only_closes or not self._stopped or self._closing)
            if self._closing:
                return False
        try:
            self._book.replay(plan.operations)
        except RanksDisagree as error:
            self._channel.acknowledge(str(error))
            raise
        self._channel.acknowledge()
        if plan.chunks:
            if not isinstance(self._channel.receive(GO_TIMEOUT_S), Go):
                raise StepLoopDied(f"the leader did not begin step {plan.number}")
            self._runner.forward(plan.chunks)
        with self._changed:
            self._number = plan.number
        return True
