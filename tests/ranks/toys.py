"""A toy engine with a real step thread, for tests of what stands around an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from torpor.actors.config import RankSpec
from torpor.actors.engine.protocol import (
    EventSink,
    InvalidPrompt,
    OwnSource,
    StagedWeights,
    WeightsRefused,
    WeightsSource,
)
from torpor.actors.messages import EngineChoices, FinishReason, GenerateRequest, TokenEvent
from torpor.native import Device, Ledger

MIB = 1 << 20
WEIGHTS_BYTES = 32 * MIB
KV_BYTES = 16 * MIB
THINKING_STEPS = 700


class ToyEngine:
    """Says "x" max_tokens times, one a step for every request. Its memory: a region of weights, one of kv_cache.

    The prompt "think" is answered after a second or two of silence; "die" makes the step loop end with an error.
    """

    def __init__(self, spec: RankSpec, ledger: Ledger, device: Device, step_s: float = 0.002) -> None:
        self.spec = spec
        self.ledger = ledger
        self.step_s = step_s
        self.refreshed = 0
        self.refresh_error = ""
        self.resumed = 0
        self.forgotten = 0
        self.reloaded = 0
        self.pieces, self.piece_s, self.fails_at = 3, 0.0, -1  # of a reload
        self.source_error, self.source_changed = "", False
        self.changes: list[bool] = []  # as weights_changed was told
        self.steps = 0
        self._running: dict[str, list[int]] = {}  # request → tokens said, tokens wanted
        self._cancelled: set[str] = set()
        self._lock = threading.Condition()
        self._want_rest = False
        self._resting = False
        self._reap_allowed = False
        self._closing = False
        self._error = ""
        self._sink: EventSink | None = None
        self._thread: threading.Thread | None = None

    def load(self) -> None:
        self.ledger.create_region("weights", WEIGHTS_BYTES, name="weights", restore="pinned")
        self.ledger.create_region("kv_cache", KV_BYTES, name="kv", restore="none")

    def start(self, sink: EventSink) -> None:
        self._sink = sink
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def prepare(self, request: GenerateRequest) -> object:
        if request.prompt == "invalid":
            raise InvalidPrompt("this prompt is not to be had; send another")
        return request

    def submit(self, prepared: object) -> None:
        assert isinstance(prepared, GenerateRequest)
        with self._lock:
            if prepared.prompt == "die":
                self._error = "the toy was told to die"
            said = -THINKING_STEPS if prepared.prompt == "think" else 0
            self._running[prepared.id] = [said, prepared.sampling.max_tokens or 4]
            self._lock.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._running:
                self._cancelled.add(request_id)
                self._lock.notify_all()

    def running(self) -> int:
        return len(self._running)

    def waiting(self) -> int:
        return 0

    def quiesce(self, timeout_s: float) -> int:
        with self._lock:
            self._want_rest = True
            self._lock.notify_all()
            if not self._lock.wait_for(lambda: self._resting, timeout_s):
                raise TimeoutError("the toy does not rest")
            return 0

    def resume(self) -> None:
        with self._lock:
            self.resumed += 1
            self._want_rest = self._resting = False
            self._lock.notify_all()

    def reap(self, allowed: bool) -> None:
        with self._lock:
            self._reap_allowed = allowed
            self._lock.notify_all()

    def refresh(self) -> None:
        self.refreshed += 1
        if self.refresh_error:
            raise RuntimeError(self.refresh_error)

    def check_weights(self, source: WeightsSource) -> tuple[str, int]:
        raise WeightsRefused("a toy takes no weights")

    def stage_weights(self, source: WeightsSource, go_on: Callable[[], None]) -> StagedWeights:
        raise WeightsRefused("a toy takes no weights")

    def write_weights(self, staged: StagedWeights) -> None:
        raise WeightsRefused("a toy takes no weights")

    def forget_prefixes(self) -> None:
        self.forgotten += 1

    def check_source(self) -> OwnSource:
        if self.source_error:
            raise WeightsRefused(self.source_error)
        return OwnSource("the toy", "d", WEIGHTS_BYTES, 0, self.source_changed)

    def reload_weights(self, go_on: Callable[[], None]) -> str:
        for piece in range(self.pieces):
            go_on()
            if self.fails_at == piece:
                raise OSError("the source's disk has failed")
            time.sleep(self.piece_s)
        self.reloaded += 1
        return "r"

    def choices(self) -> EngineChoices:
        return EngineChoices("by hand", graphs_off="a toy has none")

    def weights_changed(self, others: bool) -> None:
        self.changes.append(others)

    def error(self) -> str:
        return self._error

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(5)

    @property
    def resting(self) -> bool:
        return self._resting

    def _loop(self) -> None:
        while not self._closing and not self._error:
            with self._lock:
                self._resting = self._want_rest
                self._lock.notify_all()
                reaps = self._resting and self._reap_allowed and bool(self._cancelled)
                if (self._want_rest or not self._running) and not reaps:
                    self._lock.wait(0.1)
                    continue
                events = self._reap() if reaps else self._step()
            assert self._sink is not None
            self._sink(events)
            time.sleep(self.step_s)

    def _step(self) -> Sequence[TokenEvent]:
        # Touching memory that sleeps would be a fault on a real device; here it is an assertion.
        assert not self.ledger.parked_tags, "a step while something is parked"
        self.steps += 1
        events = []
        for request, count in list(self._running.items()):
            finish = FinishReason.ABORT if request in self._cancelled else None
            if finish is None:
                count[0] += 1
                if count[0] <= 0:
                    continue  # it thinks
                finish = FinishReason.LENGTH if count[0] >= count[1] else None
            text = "" if finish is FinishReason.ABORT else "x"
            events.append(TokenEvent(request, text, finish_reason=finish, completion_tokens=count[0]))
            if finish is not None:
                del self._running[request]
                self._cancelled.discard(request)
        return events

    def _reap(self) -> Sequence[TokenEvent]:
        gone = [request for request in self._running if request in self._cancelled]
        self._cancelled.clear()
        said = {request: self._running.pop(request)[0] for request in gone}
        return [
            TokenEvent(request, finish_reason=FinishReason.ABORT, completion_tokens=count)
            for request, count in said.items()
        ]


def make_engine(spec: RankSpec, ledger: Ledger, device: Device) -> ToyEngine:
    """For `engine.kind: ranks.toys:make_engine`."""
    return ToyEngine(spec, ledger, device)


def make_slow_engine(spec: RankSpec, ledger: Ledger, device: Device) -> ToyEngine:
    """Says ten tokens a second, as a large model does: streams last, and many of them cost nothing."""
    return ToyEngine(spec, ledger, device, step_s=0.1)
