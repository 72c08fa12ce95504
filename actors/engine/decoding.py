"""Whether a model that has loaded decodes by captured graphs, and giving it some."""

from __future__ import annotations

import logging

import torch
from torch.utils.dlpack import from_dlpack

from torpor.actors.config import ModelConfig
from torpor.actors.engine.batch import Pages
from torpor.actors.engine.decode_graphs import (
    ON,
    SHORT_TOKENS,
    TAG,
    CudaCapture,
    DecodeGraphs,
    buckets,
    why_off,
)
from torpor.actors.engine.decode_inputs import DecodeInputs
from torpor.actors.engine.experts import CapturedExperts, captured_experts, has_experts
from torpor.actors.engine.families import check_config
from torpor.actors.engine.group import RankGroup
from torpor.actors.engine.loader import LoadedModel
from torpor.actors.engine.runner import ModelRunner
from torpor.native import Ledger

log = logging.getLogger(__name__)


def give_graphs(
    model: ModelConfig,
    loaded: LoadedModel,
    pages: Pages,
    runner: ModelRunner,
    ledger: Ledger,
    attention: str,
    group: RankGroup,
) -> str:
    """Capture them before there are sequences, or say why not. attention: what was chosen. group: joined."""
    engine, ranks = model.engine, model.tensor_parallel
    family = check_config(loaded.config, ranks)
    reason = why_off(engine, ranks, pages.device.type, attention, group.backend)
    experts = None
    if not reason and has_experts(family, loaded.config):
        experts = captured_experts(loaded.module, loaded.config, loaded.dtype, pages.device)
    most_lines = lines_of(engine.max_running, bool(pages.states), experts)
    if not reason and most_lines < 1:
        reason = (
            "the experts of one token are too large to be copied, and no kernel groups tokens on the device"
        )
    # All ranks or none: a bucket has more lines than there are tokens, and the sums of all ranks as many.
    if not group.agree("graphs", not reason) and not reason:
        reason = "another rank has none"
    if reason:
        log.info("model %s decodes without CUDA graphs: %s", model.name, reason)
        return reason
    # Here, not above: a machine without a GPU has no triton.
    from torpor.actors.engine.tiled import read_singles

    def make_memory(size_bytes: int) -> torch.Tensor:
        return from_dlpack(ledger.create_region(TAG, size_bytes, name="inputs", preserve_always=True))

    inputs = DecodeInputs(pages, buckets(most_lines)[-1], loaded.context_tokens, make_memory, read_singles)
    capture = CudaCapture(ledger, pages.device)
    computing = {"computing": experts.computing} if experts is not None else {}
    graphs = DecodeGraphs(inputs, most_lines, capture, **computing)
    try:
        runner.capture(graphs)
    except RuntimeError as error:  # torch's, of CUDA
        # One of several ranks has left the others within a sum. Who has asked for graphs is to know at once.
        if ranks > 1 or engine.cuda_graphs == ON:
            raise
        # Nor is one to be slow for good since it loaded beside others that would have given way to it.
        if isinstance(error, torch.OutOfMemoryError) and model.gate.make_room != "none":
            raise
        graphs.close()
        reason = f"capturing failed: {str(error).partition(chr(10))[0]}"
        log.warning("model %s decodes without CUDA graphs: %s", model.name, reason)
        return reason
    return ""


def lines_of(max_running: int, has_states: bool, experts: CapturedExperts | None) -> int:
    """Of the largest bucket. Where a prompt's tokens may have lines, a short one finds room also if few run."""
    lines = max_running if has_states else max(max_running, SHORT_TOKENS)
    if experts is None or experts.most_lines is None or experts.most_lines >= lines:
        return lines
    return 1 << (experts.most_lines.bit_length() - 1) if experts.most_lines else 0
