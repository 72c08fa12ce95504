"""Whether a model that has loaded decodes by captured graphs, and giving it some."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from torpor.actors.config import ModelConfig
from torpor.actors.engine.batch import Pages
from torpor.actors.engine.decode_graphs import TAG, CudaCapture, DecodeGraphs, buckets, why_off
from torpor.actors.engine.decode_inputs import DecodeInputs
from torpor.actors.engine.families import check_config
from torpor.actors.engine.runner import ModelRunner
from torpor.native import Ledger

log = logging.getLogger(__name__)


def give_graphs(
    model: ModelConfig,
    config: Any,
    context_tokens: int,
    pages: Pages,
    runner: ModelRunner,
    ledger: Ledger,
    attention: str,
) -> str:
    """Capture them before there are sequences, or say why not. config: transformers'. attention: what was chosen."""
    engine, ranks = model.engine, model.tensor_parallel
    reason = why_off(engine, check_config(config, ranks), config, ranks, pages.device.type, attention)
    if reason:
        log.info("model %s decodes without CUDA graphs: %s", model.name, reason)
        return reason
    # Here, not above: a machine without a GPU has no triton.
    from torpor.actors.engine.tiled import read_singles

    def make_memory(size_bytes: int) -> torch.Tensor:
        return from_dlpack(ledger.create_region(TAG, size_bytes, name="inputs", preserve_always=True))

    most = buckets(engine.max_running)[-1]
    inputs = DecodeInputs(pages, most, context_tokens, make_memory, read_singles)
    runner.capture(DecodeGraphs(inputs, engine.max_running, CudaCapture(ledger, pages.device)))
    return ""
