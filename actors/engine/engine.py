"""The default engine of one rank: a transformers model over paged K and V in the rank's ledger."""

from __future__ import annotations

import secrets
from datetime import timedelta

import torch
import torch.distributed as dist

from torpor.actors.config import RankSpec
from torpor.actors.engine.batch import Pages
from torpor.actors.engine.channel import FollowerChannel, LeaderChannel
from torpor.actors.engine.detokenizer import IncrementalDetokenizer, StopStrings
from torpor.actors.engine.errors import ModelRefused
from torpor.actors.engine.follower import FollowerLoop
from torpor.actors.engine.leader import LeaderLoop
from torpor.actors.engine.loader import LoadedModel, load_model
from torpor.actors.engine.protocol import EventSink, InvalidPrompt
from torpor.actors.engine.request import Request
from torpor.actors.engine.runner import ModelRunner
from torpor.actors.engine.sampling import Sampler, check_sampling
from torpor.actors.engine.scheduler import Limits, Scheduler
from torpor.actors.engine.sequences import SequenceBook
from torpor.actors.engine.shard import shard
from torpor.actors.messages import GenerateRequest, RestoreMode
from torpor.native import Device, KvManager, Ledger
from torpor.native.adopt import Adopted, check_adopted

JOIN_TIMEOUT_S = 300.0  # ranks load at different speeds
STEP_TIMEOUT_S = 120.0  # of one collective, or of a follower's answer


class TransformersEngine:
    """See protocol.Engine. Tensor parallelism runs over gloo, one process a rank."""

    def __init__(self, spec: RankSpec, ledger: Ledger, device: Device) -> None:
        _check_spec(spec)
        self._spec = spec
        self._ledger = ledger
        self._device = device
        self._model: LoadedModel | None = None
        self._adopted: Adopted | None = None
        self._manager: KvManager | None = None
        self._book: SequenceBook | None = None
        self._loop: LeaderLoop | FollowerLoop | None = None
        self._joined = False

    def load(self) -> None:
        spec, engine = self._spec, self._spec.model.engine
        ranks = spec.model.tensor_parallel
        model = load_model(engine, ranks, self._device.kind)
        if ranks > 1:
            shard(model.module, spec.rank, ranks)
        self._adopted = self._ledger.adopt(model.module)
        manager = self._make_manager(model)
        pages = Pages(manager, int(model.config.num_hidden_layers), self._torch_device())
        leads = spec.rank == 0
        book = SequenceBook(manager, record=leads and ranks > 1)
        runner = ModelRunner(model.module, pages, book, makes_logits=leads)
        self._model, self._manager, self._book = model, manager, book
        if leads:
            channel = LeaderChannel(spec.step_channel, spec.channel_key, ranks - 1, STEP_TIMEOUT_S)
            self._join_group()
            channel.connect()
            scheduler = Scheduler(book, Limits(engine.max_running, engine.step_tokens))
            self._loop = LeaderLoop(
                scheduler,
                book,
                runner,
                channel,
                max_waiting=engine.max_waiting,
                synchronize=self._synchronize,
                leave_group=self._leave_group,
            )
        else:
            self._join_group()
            follower = FollowerChannel(spec.step_channel, spec.channel_key, spec.rank, JOIN_TIMEOUT_S)
            self._loop = FollowerLoop(book, runner, follower, self._synchronize, self._leave_group)

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
        check_sampling(request.sampling)
        prompt = _tokens(request, model)
        pool_tokens = manager.slots * manager.tokens_per_block
        most, bound = min(
            (model.context_tokens, "the model's context"),
            (pool_tokens, "the KV pool (raise kv_cache.gpu_bytes)"),
        )
        left = most - len(prompt)
        wanted = request.sampling.max_tokens
        if left < 1 or (wanted is not None and wanted > left):
            asked = f" and max_tokens {wanted}" if wanted is not None else ""
            raise InvalidPrompt(
                f"the prompt's {len(prompt)} tokens{asked} exceed the {most} tokens of {bound}"
            )
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        return Request(
            id=request.id,
            scope=request.scope,
            prompt=prompt,
            max_tokens=wanted if wanted is not None else left,
            eos_token_ids=model.eos_token_ids,
            sampler=Sampler(request.sampling, seed),
            detokenizer=IncrementalDetokenizer(model.tokenizer, prompt),
            stops=StopStrings(request.sampling.stop),
        )

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

    def quiesce(self, timeout_s: float) -> int:
        return self._loaded().quiesce(timeout_s)

    def resume(self) -> None:
        self._loaded().resume()

    def refresh(self) -> None:
        """Nothing is derived from weights or pages; what is checked is that the module still uses its regions."""
        if self._model is not None and self._adopted is not None:
            check_adopted(self._model.module, self._adopted)

    def error(self) -> str:
        return self._loop.error() if self._loop is not None else ""

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
        self._leave_group()
        self._loop = self._model = self._adopted = self._manager = self._book = None

    def _make_manager(self, model: LoadedModel) -> KvManager:
        cache, config = self._spec.model.kv_cache, model.config
        restore = self._spec.model.restore_modes.get("kv_cache", RestoreMode.NONE)
        return self._ledger.create_kv_manager(
            layers=int(config.num_hidden_layers),
            kv_heads=int(config.num_key_value_heads) // self._spec.model.tensor_parallel,
            head_dim=int(
                getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            ),
            dtype=str(model.dtype).removeprefix("torch."),
            tokens_per_block=cache.tokens_per_block,
            gpu_bytes=cache.gpu_bytes,
            host_bytes=cache.host_bytes,
            restore=str(restore),
        )

    def _join_group(self) -> None:
        ranks = self._spec.model.tensor_parallel
        if ranks == 1:
            return
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self._spec.process_group}",
            rank=self._spec.rank,
            world_size=ranks,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        )
        self._joined = True

    def _leave_group(self) -> None:
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    def _torch_device(self) -> torch.device:
        if self._device.kind == "cuda":
            return torch.device("cuda", self._device.ordinal)
        return torch.device("cpu")

    def _synchronize(self) -> None:
        if self._device.kind == "cuda":
            torch.cuda.synchronize(self._torch_device())

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


def _tokens(request: GenerateRequest, model: LoadedModel) -> tuple[int, ...]:
    given = [part for part in (request.prompt, request.token_ids, request.messages) if part is not None]
    if len(given) != 1:
        raise InvalidPrompt("give exactly one of prompt, token_ids and messages")
    if request.prompt is not None:
        tokens = tuple(model.tokenizer.encode(request.prompt))
    elif request.messages is not None:
        tokens = tuple(model.tokenizer.encode_messages(request.messages))
    else:
        tokens = tuple(request.token_ids or ())
    if not tokens:
        raise InvalidPrompt("the prompt is empty; give at least one token")
    vocabulary = int(model.config.vocab_size)
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise InvalidPrompt(f"token id {wrong} is not in the model's vocabulary of {vocabulary}")
    return tokens
