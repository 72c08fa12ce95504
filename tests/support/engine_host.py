"""One rank's engine in this process, on a host device, with everything it says collected by request."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from torpor.actors.config import MIB, DeviceConfig, EngineConfig, KvCacheConfig, ModelConfig, RankSpec
from torpor.actors.engine import Engine, make_engine
from torpor.actors.engine.engine import TransformersEngine
from torpor.actors.messages import GenerateRequest, Sampling, TokenEvent
from torpor.native import Device, Ledger

WAIT_S = 60.0
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # large enough that greedy texts wander
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def write_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(TINY | changes))
    return path


def dummy_spec(
    config: Path, *, kv: KvCacheConfig | None = None, tensor_parallel: int = 1, **engine: Any
) -> RankSpec:
    """kv: by default 8 tokens a block, 2 MiB on the device and on the host."""
    model = ModelConfig(
        name="tiny",
        engine=EngineConfig(model=str(config), load_format="dummy", **engine),
        tensor_parallel=tensor_parallel,
        kv_cache=kv or KvCacheConfig(tokens_per_block=8, gpu_bytes=2 * MIB, host_bytes=2 * MIB),
    )
    return RankSpec(
        model=model,
        rank=0,
        incarnation="test",
        device=DeviceConfig(kind="host"),
        device_index=0,
        host_pool_bytes=0,
    )


@dataclass
class Said:
    """What one request was answered."""

    events: list[TokenEvent] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def last(self) -> TokenEvent:
        return self.events[-1]

    @property
    def cached(self) -> int:
        return self.last.cached_tokens

    def wait(self) -> Said:
        assert self.done.wait(WAIT_S), f"no end after {WAIT_S} s; so far {self.events}"
        return self


class EngineHost:
    """Use as a context manager.

    capacity_bytes: of the host device, which is this object's alone. disk: a folder for sleeps to disk.
    options: the engine's time-outs.
    """

    def __init__(
        self,
        spec: RankSpec,
        capacity_bytes: int = 64 * MIB,
        device: Device | None = None,
        disk: Path | None = None,
        **options: float,
    ) -> None:
        self.spec = spec
        self.device = device or Device.host(f"engine-{uuid.uuid4().hex[:12]}", capacity_bytes)
        place = {"disk_path": str(disk), "disk_bytes": capacity_bytes} if disk else {}
        self.ledger = Ledger(self.device, spec.host_pool_bytes, **place)
        self.engine: Engine
        if options:
            self.engine = TransformersEngine(spec, self.ledger, self.device, **options)
        else:
            self.engine = make_engine(spec, self.ledger, self.device)
        self.said: dict[str, Said] = {}
        self._numbers = 0

    def __enter__(self) -> EngineHost:
        self.engine.load()
        self.engine.start(self._sink)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def _sink(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            said = self.said[event.request]
            said.events.append(event)
            if event.finish_reason is not None:
                said.done.set()

    def ask(
        self,
        prompt: Sequence[int] | str | None = None,
        *,
        scope: str = "",
        messages: Any = None,
        **sampling: Any,
    ) -> Said:
        """Submit and return at once. Greedy unless told otherwise."""
        self._numbers += 1
        request = GenerateRequest(
            id=f"request-{self._numbers}",
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if prompt is None or isinstance(prompt, str) else tuple(prompt),
            messages=messages,
            sampling=Sampling(**({"temperature": 0.0} | sampling)),
            scope=scope,
        )
        prepared = self.engine.prepare(request)
        said = self.said[request.id] = Said()
        self.engine.submit(prepared)
        return said

    def tell(self, prompt: Sequence[int] | str | None = None, **options: Any) -> Said:
        """Ask and wait for the end."""
        return self.ask(prompt, **options).wait()

    def sleep(self, tags: Sequence[str], mode: str) -> int:
        """A whole sleep of these tags; returns the bytes it freed."""
        self.engine.quiesce(WAIT_S)
        try:
            return int(self._transact("sleep", tags, dict.fromkeys(tags, mode))["freed_bytes"])
        except BaseException:
            self.engine.resume()
            raise

    def wake(self, tags: Sequence[str], reload: bool = False) -> None:
        """reload: weights that came back without contents are made anew."""
        self._transact("wake", tags, None)
        if reload:
            self.engine.check_source()
            self.engine.reload_weights(lambda: None)
            self.engine.weights_changed(False)
        self.engine.refresh()
        self.engine.resume()

    def _transact(self, kind: str, tags: Sequence[str], restore: dict[str, str] | None) -> dict[str, Any]:
        plan = self.ledger.preflight(kind, uuid.uuid4().hex, list(tags), restore)
        assert not plan.refusals, plan.refusals
        self.ledger.stage(plan, WAIT_S)
        report = self.ledger.commit()
        self.ledger.publish()
        return report


class Oracle:
    """The same dummy weights in transformers' own class, without a cache: every token is a full forward."""

    def __init__(
        self, config: Path, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        """dtype: in which weights are made (a seed stands for other numbers in others) and the forward computes."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**json.loads(config.read_text())),
                dtype=dtype,
                attn_implementation="eager",
            )
        self.model = model.to(device).eval()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """(tokens, vocabulary)."""
        read = torch.tensor([list(tokens)], device=self.model.device)
        return self.model(read, use_cache=False).logits[0].float().cpu()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def gaps(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """(tokens of answer,): by how much each one's logit lies below that of the likeliest after those before it."""
        logits = self.logits([*prompt, *answer][:-1])[len(prompt) - 1 :]
        said = logits.gather(1, torch.tensor(list(answer))[:, None])[:, 0]
        return logits.amax(dim=-1) - said

    def agrees(self, prompt: Sequence[int], answer: Sequence[int], within: float = 0.0) -> bool:
        """Whether `answer` is its greedy text, from one forward: each token is the likeliest after those before it.

        within: or as likely but for this difference of logits; of millions of tokens some are, but for rounding.
        """
        return bool(answer) and bool((self.gaps(prompt, answer) <= within).all())


def small_model() -> Path:
    """The small real model's file: TORPOR_TEST_MODEL, else the project's own download."""
    named = os.environ.get("TORPOR_TEST_MODEL")
    if named:
        return Path(named)
    from torpor.service.default_model import ensure_default_model

    return ensure_default_model(dict(os.environ))


def real_spec(model: Path) -> RankSpec:
    """A quarter of a GiB of KV."""
    return RankSpec(
        model=ModelConfig(
            name="small",
            engine=EngineConfig(model=str(model)),
            kv_cache=KvCacheConfig(gpu_bytes=256 * MIB, host_bytes=256 * MIB),
        ),
        rank=0,
        incarnation="test",
        device=DeviceConfig(kind="host"),
        device_index=0,
        host_pool_bytes=0,
    )
