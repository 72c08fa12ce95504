"""The default engine of one rank: a transformers model over paged K and V in the rank's ledger."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torpor.actors.config import RankSpec
from torpor.actors.engine.attention import make_reader
from torpor.actors.engine.batch import Pages
from torpor.actors.engine.channel import FollowerChannel, LeaderChannel
from torpor.actors.engine.decoding import give_graphs
from torpor.actors.engine.errors import ModelRefused
from torpor.actors.engine.follower import FollowerLoop
from torpor.actors.engine.group import GLOO, NCCL, RankGroup
from torpor.actors.engine.layers import has_kind, layer_specs, longest_text_tokens
from torpor.actors.engine.leader import LeaderLoop
from torpor.actors.engine.loader import LoadedModel, load_model
from torpor.actors.engine.prepare import prepare
from torpor.actors.engine.protocol import EventSink, InvalidPrompt, OwnSource, StagedWeights, WeightsSource
from torpor.actors.engine.request import Request
from torpor.actors.engine.rereading import Rereading
from torpor.actors.engine.runner import ModelRunner
from torpor.actors.engine.scheduler import Limits, Scheduler
from torpor.actors.engine.sequences import SequenceBook
from torpor.actors.engine.shard import shard
from torpor.actors.engine.waiting import until_computed
from torpor.actors.engine.weights import Target, open_reader
from torpor.actors.messages import EngineChoices, GenerateRequest, RestoreMode
from torpor.native import Device, KvManager, LayerSpec, Ledger
from torpor.native.adopt import Adopted, check_adopted

JOIN_TIMEOUT_S = 300.0  # ranks load at different speeds
USUAL_TEXT_TOKENS = 4096  # divides the KV cache over layers that keep all and layers that keep a window
STEP_TIMEOUT_S = 120.0  # of one collective, or of a follower's answer


class TransformersEngine:
    """See protocol.Engine. Tensor parallelism: one process a rank, sums over NCCL or gloo (group.py)."""

    def __init__(
        self,
        spec: RankSpec,
        ledger: Ledger,
        device: Device,
        *,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        _check_spec(spec)
        self._spec = spec
        self._ledger = ledger
        self._device = device
        self._join_timeout_s = join_timeout_s
        self._step_timeout_s = step_timeout_s
        self._group = RankGroup(
            spec.process_group,
            spec.rank,
            spec.model.tensor_parallel,
            join_timeout_s,
            step_timeout_s,
            gpu=device.id if device.kind == "cuda" and spec.model.engine.collectives != GLOO else "",
            device=self._torch_device(),
        )
        self._model: LoadedModel | None = None
        self._rereading: Rereading | None = None
        self._adopted: Adopted | None = None
        self._manager: KvManager | None = None
        self._book: SequenceBook | None = None
        self._runner: ModelRunner | None = None
        self._loop: LeaderLoop | FollowerLoop | None = None
        # Why it decodes without CUDA graphs; "": it has them.
        self.graphs_off = "the model is not loaded"

    def load(self) -> None:
        spec, ranks = self._spec, self._spec.model.tensor_parallel
        self._rereading = Rereading(spec.model.engine)
        model = load_model(spec.model.engine, ranks, self._device.kind)
        if ranks > 1:
            shard(model.module, spec.rank, ranks)
        restore = spec.model.restore_modes.get("weights", RestoreMode.PINNED)
        self._adopted = self._ledger.adopt(model.module, restore=restore.value)
        specs = layer_specs(model.config, model.dtype, ranks)
        manager = self._make_manager(model, specs)
        reader = make_reader(spec.model.engine.attention, self._device.kind)
        pages = Pages(manager, specs, self._torch_device(), reader)
        leads = spec.rank == 0
        book = SequenceBook(manager, record=leads and ranks > 1)
        runner = ModelRunner(model.module, pages, book, leads, self._step_computed)
        self._model, self._manager, self._book, self._runner = model, manager, book, runner
        try:
            self._group.join()
            self.graphs_off = give_graphs(
                spec.model, model, pages, runner, self._ledger, reader.name, self._group
            )
            self._loop = self._lead(book, runner) if leads else self._follow(book, runner)
        except BaseException:
            runner.close()
            self._group.abort()
            raise

    def _lead(self, book: SequenceBook, runner: ModelRunner) -> LeaderLoop:
        spec, engine = self._spec, self._spec.model.engine
        followers = spec.model.tensor_parallel - 1
        channel = LeaderChannel(spec.step_channel, spec.channel_key, followers, self._step_timeout_s)
        try:
            channel.connect()
        except BaseException:
            channel.close()
            raise
        return LeaderLoop(
            Scheduler(book, self._limits()),
            book,
            runner,
            channel,
            max_waiting=engine.max_waiting,
            synchronize=self._synchronize,
            leave_group=self._group.abort,
        )

    def _limits(self) -> Limits:
        """A window's pages come back while a prompt is read: it may be longer than they are many."""
        manager, engine = self._manager, self._spec.model.engine
        assert manager is not None
        return Limits(
            engine.max_running,
            engine.step_tokens,
            whole_prompts=not has_kind(manager, "window"),
            state_block=manager.tokens_per_block if has_kind(manager, "state") else 0,
        )

    def _follow(self, book: SequenceBook, runner: ModelRunner) -> FollowerLoop:
        spec = self._spec
        channel = FollowerChannel(spec.step_channel, spec.channel_key, spec.rank, self._join_timeout_s)
        return FollowerLoop(book, runner, channel, self._synchronize, self._group.abort)

    def start(self, sink: EventSink) -> None:
        loop = self._loaded()
        if isinstance(loop, LeaderLoop):
            loop.start(sink)
        else:
            loop.start()

    def prepare(self, request: GenerateRequest) -> Request:
        model, manager = self._model, self._manager
        if model is None or manager is None:
            raise InvalidPrompt("the model is not loaded yet")
        return prepare(request, model, longest_text_tokens(manager))

    def submit(self, prepared: object) -> None:
        """Raises ports.QueueFull at the bound, StepLoopDied when nothing would ever answer."""
        if not isinstance(prepared, Request):
            raise TypeError(f"submit takes what prepare returned, not {type(prepared).__name__}")
        self._leads("submit").submit(prepared)

    def cancel(self, request_id: str) -> None:
        self._leads("cancel").cancel(request_id)

    def running(self) -> int:
        return self._loop.running() if isinstance(self._loop, LeaderLoop) else 0

    def waiting(self) -> int:
        return self._loop.waiting() if isinstance(self._loop, LeaderLoop) else 0

    @property
    def attention(self) -> str:
        """The implementation that it has chosen, as `engine.attention` names it."""
        return make_reader(self._spec.model.engine.attention, self._device.kind).name

    @property
    def collectives(self) -> str:
        """By what the ranks add up: nccl or gloo; "": there is but one."""
        return self._group.backend if self._spec.model.tensor_parallel > 1 else ""

    def choices(self) -> EngineChoices:
        return EngineChoices(self.attention, self.collectives, self.graphs_off)

    def quiesce(self, timeout_s: float) -> int:
        return self._loaded().quiesce(timeout_s)

    def resume(self) -> None:
        self._loaded().resume()

    def reap(self, allowed: bool) -> None:
        if isinstance(self._loop, LeaderLoop):
            self._loop.reap(allowed)

    def refresh(self) -> None:
        """Nothing is derived from weights or pages; what is checked is that the module still uses its regions."""
        if self._model is not None and self._adopted is not None:
            check_adopted(self._model.module, self._adopted)

    def check_weights(self, source: WeightsSource) -> tuple[str, int]:
        target = self._target()
        return target.check(open_reader(source, target, whole=False)), target.size_bytes

    def stage_weights(self, source: WeightsSource, go_on: Callable[[], None]) -> StagedWeights:
        target = self._target()
        return target.stage(open_reader(source, target, whole=True), go_on)

    def write_weights(self, staged: StagedWeights) -> None:
        target, adopted = self._target(), self._adopted
        assert adopted is not None and adopted.weights is not None
        adopted.weights.contents_changed()  # first: whatever becomes of the writing, the old backup is not these
        for name in target.parameters:
            self._write_one(target.parameters[name], staged.tensors[name])
        self._synchronize()
        self.weights_changed(others=True)  # also a backup that was made meanwhile

    def check_source(self) -> OwnSource:
        target = self._target()
        assert self._rereading is not None
        return self._rereading.check(target)

    def reload_weights(self, go_on: Callable[[], None]) -> str:
        target = self._target()
        assert self._rereading is not None
        try:
            return self._rereading.write(target, go_on)
        finally:
            self._synchronize()

    def weights_changed(self, others: bool) -> None:
        adopted = self._adopted
        assert adopted is not None and adopted.weights is not None
        adopted.weights.contents_changed()
        if others:
            self.forget_prefixes()

    def forget_prefixes(self) -> None:
        assert self._manager is not None
        self._manager.forget_prefixes()
        if isinstance(self._loop, LeaderLoop):
            self._loop.compute_anew()

    @staticmethod
    def _write_one(parameter: torch.Tensor, value: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(value)

    def _target(self) -> Target:
        if self._model is None:
            raise RuntimeError("the engine is not loaded; call load() first")
        return Target(self._model, self._spec.rank, self._spec.model.tensor_parallel)

    def error(self) -> str:
        return self._loop.error() if self._loop is not None else ""

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
        if self._runner is not None:
            self._runner.close()
        self._group.leave()
        self._loop = self._runner = self._model = self._adopted = self._manager = self._book = None

    def _make_manager(self, model: LoadedModel, specs: list[LayerSpec]) -> KvManager:
        cache = self._spec.model.kv_cache
        restore = self._spec.model.restore_modes.get("kv_cache", RestoreMode.NONE)
        return self._ledger.create_kv_cache(
            specs,
            tokens_per_block=cache.tokens_per_block,
            restore=str(restore),
            sequence_tokens=min(model.context_tokens, USUAL_TEXT_TOKENS),
            max_sequence_tokens=model.context_tokens,
            **cache.tiers(),
        )

    def _torch_device(self) -> torch.device:
        if self._device.kind == "cuda":
            return torch.device("cuda", self._device.ordinal)
        return torch.device("cpu")

    def _synchronize(self) -> None:
        if self._device.kind == "cuda":
            torch.cuda.synchronize(self._torch_device())

    def _step_computed(self) -> None:
        """Until the step lies in the pages: the manager copies and moves them on streams of its own."""
        if self._group.backend == NCCL:
            until_computed(self._torch_device(), self._step_timeout_s)
        else:
            self._synchronize()

    def _loaded(self) -> LeaderLoop | FollowerLoop:
        if self._loop is None:
            raise RuntimeError("the engine is not loaded; call load() first")
        return self._loop

    def _leads(self, call: str) -> LeaderLoop:
        loop = self._loaded()
        if not isinstance(loop, LeaderLoop):
            raise RuntimeError(f"{call} is for the leader; this is rank {self._spec.rank}")
        return loop


def _check_spec(spec: RankSpec) -> None:
    engine, ranks = spec.model.engine, spec.model.tensor_parallel
    for name, value in (
        ("engine.max_running", engine.max_running),
        ("engine.max_waiting", engine.max_waiting),
        ("engine.step_tokens", engine.step_tokens),
        ("tensor_parallel", ranks),
    ):
        if value < 1:
            raise ModelRefused(f"{name} is {value}; it must be at least 1")
    if ranks > 1 and not (spec.process_group and spec.step_channel and spec.channel_key):
        raise ModelRefused(
            "tensor_parallel above 1 needs process_group, step_channel and channel_key in the spec"
        )
