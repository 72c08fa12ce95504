"""A transformers model and its tokenizer from a checked source, on the CPU, ready to be sharded and adopted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from torpor.actors.config import EngineConfig
from torpor.actors.engine.attention import ATTENTION, check_implementation, register
from torpor.actors.engine.decode_graphs import check_setting
from torpor.actors.engine.errors import ModelRefused
from torpor.actors.engine.families import check_config
from torpor.actors.engine.gguf_reading import parsed_once
from torpor.actors.engine.group import check_collectives
from torpor.actors.engine.source import LoadFormat, ModelSource, resolve
from torpor.actors.engine.tokenizer import ByteTokenizer, PretrainedTokenizer, Tokenizer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """module: a causal-LM class in evaluation mode on the CPU. context_tokens: the longest text it can take."""

    module: torch.nn.Module
    config: Any
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    context_tokens: int
    dtype: torch.dtype


def load_model(engine: EngineConfig, tensor_parallel: int, device_kind: str) -> LoadedModel:
    """Raises ModelRefused before anything large is read. device_kind: host or cuda."""
    source = resolve(engine)
    check_implementation(engine.attention, device_kind)
    check_setting(engine.cuda_graphs)
    check_collectives(engine.collectives)
    register()
    with _quiet(), parsed_once():
        config = _config(source)
        check_config(config, tensor_parallel, gguf=source.format is LoadFormat.GGUF)
        context_tokens = _context_tokens(engine, config)
        dtype = _dtype(engine.dtype, config, device_kind)
        tokenizer = _tokenizer(source, config)
        module = _weights(source, config, dtype, engine.seed)
    module.requires_grad_(False).eval()
    return LoadedModel(module, config, tokenizer, _eos(module, config), context_tokens, dtype)


def read_config(source: ModelSource) -> Any:
    """Raises ModelRefused."""
    with _quiet(), parsed_once():
        return _config(source)


def read_module(source: ModelSource, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """All weights of a checkpoint, on the CPU. Raises ModelRefused."""
    register()
    with _quiet(), parsed_once():
        return _read(source, config, dtype)


def load_again(
    source: ModelSource, dtype: torch.dtype, seed: int, go_on: Callable[[], None]
) -> torch.nn.Module:
    """The weights that `load_model` made, on the CPU. Raises ModelRefused, and what go_on raises, in between."""
    poll = _Poll(go_on)
    try:
        with _quiet(), parsed_once(poll), poll:
            return _weights(source, _config(source), dtype, seed)
    except _CalledOff as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None


class _CalledOff(BaseException):
    """No Exception: whoever reads takes those for damage of the file. Its cause is what was raised."""


class _Poll(TorchFunctionMode):
    """Asks whether to go on, before each of torch's operations, too: a dummy's tensors are made one by one."""

    def __init__(self, go_on: Callable[[], None]) -> None:
        super().__init__()
        self._go_on = go_on

    def __call__(self) -> None:
        try:
            self._go_on()
        except Exception as error:
            raise _CalledOff from error

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self()
        return function(*args, **(kwargs or {}))


def _config(source: ModelSource) -> Any:
    try:
        if source.config_file is not None:
            content = json.loads(source.config_file.read_text(encoding="utf-8"))
            return AutoConfig.for_model(**content)
        return AutoConfig.from_pretrained(source.folder, **source.pretrained_kwargs())
    except Exception as error:  # damaged files make transformers and gguf raise anything
        name = source.config_file or source.folder / (source.gguf_file or "config.json")
        raise ModelRefused(f"the model's configuration in {name} cannot be read: {error}") from error


def _weights(source: ModelSource, config: Any, dtype: torch.dtype, seed: int) -> torch.nn.Module:
    dummy = source.format is LoadFormat.DUMMY
    return _dummy(config, dtype, seed) if dummy else _read(source, config, dtype)


def _read(source: ModelSource, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    name = source.folder / (source.gguf_file or "")
    model: torch.nn.Module
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
            **source.pretrained_kwargs(),
        )
    except Exception as error:  # as above
        raise ModelRefused(f"the weights in {name} cannot be read: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would serve them with random numbers
        raise ModelRefused(f"{name} lacks {len(missing)} tensors, the first {missing[0]}; download it again")
    return model


def _dummy(config: Any, dtype: torch.dtype, seed: int) -> torch.nn.Module:
    """Random weights, the same on every rank and in every process for one seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION
        )
    return model


def _tokenizer(source: ModelSource, config: Any) -> Tokenizer:
    if source.gguf_file is None and not any(source.folder.glob("tokenizer*")):
        if source.format is LoadFormat.DUMMY:
            return ByteTokenizer(int(config.vocab_size))
        raise ModelRefused(
            f"{source.folder} holds no tokenizer; put the checkpoint's tokenizer files beside it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, config=config, **source.pretrained_kwargs())
        return PretrainedTokenizer(tokenizer)
    except Exception as error:  # as above
        raise ModelRefused(f"the tokenizer of {source.folder} cannot be read: {error}") from error


def _dtype(wanted: str, config: Any, device_kind: str) -> torch.dtype:
    if wanted in DTYPES:
        return DTYPES[wanted]
    if wanted != "auto":
        raise ModelRefused(f"engine.dtype {wanted!r} is unknown; known: auto, {', '.join(DTYPES)}")
    if device_kind == "host":
        return torch.float32
    declared = getattr(config, "dtype", None)
    return declared if isinstance(declared, torch.dtype) else torch.bfloat16


def _context_tokens(engine: EngineConfig, config: Any) -> int:
    own = int(config.max_position_embeddings)
    if engine.max_context_tokens is None:
        return own
    if not 1 < engine.max_context_tokens <= own:
        raise ModelRefused(
            f"engine.max_context_tokens is {engine.max_context_tokens}; this model takes 2 to {own}"
        )
    return engine.max_context_tokens


def _eos(module: Any, config: Any) -> frozenset[int]:
    ids: set[int] = set()
    for holder in (config, getattr(module, "generation_config", None)):
        found = getattr(holder, "eos_token_id", None)
        ids.update(found if isinstance(found, list) else [] if found is None else [found])
    return frozenset(ids)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, which belong to no log."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
