"""Tensor parallelism by slicing a loaded module after the plan that its transformers class declares.

Column-wise layers keep a share of their outputs, row-wise layers a share of their inputs and add up over the ranks.
Embeddings and the output head stay whole on every rank: the rows of the result are then the same everywhere, and the
leader samples without another collective.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torpor.actors.engine.errors import ModelRefused

COLWISE, ROWWISE = "colwise", "rowwise"
WHOLE = ("embedding_rowwise", "colwise_gather_output", "colwise_rep", "replicated_with_grad_allreduce")


def shard(model: torch.nn.Module, rank: int, ranks: int) -> None:
    """Slice `model` in place to rank's share; collectives go through the default process group."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    styles = {name: _style(plan, name) for name, module in model.named_modules() if _is_linear(module)}
    unplanned = sorted(name for name, style in styles.items() if not style and not name.endswith("lm_head"))
    if unplanned:
        raise ModelRefused(
            f"{type(model).__name__} has no tensor-parallel plan for {unplanned[0]}; use 1 rank"
        )
    for name, style in styles.items():
        module = model.get_submodule(name)
        assert isinstance(module, torch.nn.Linear)
        if style == COLWISE:
            _keep_outputs(module, rank, ranks)
        elif style == ROWWISE:
            _keep_inputs(module, rank, ranks)
        elif style and style not in WHOLE:
            raise ModelRefused(
                f"{type(model).__name__} shards {name} as {style!r}, which is not served; use 1 rank"
            )


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def _style(plan: dict[str, str], name: str) -> str:
    pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
    return plan.get(pattern, "")


def _keep_outputs(module: torch.nn.Linear, rank: int, ranks: int) -> None:
    module.weight.data = module.weight.data.chunk(ranks, dim=0)[rank].clone()
    if module.bias is not None:
        module.bias.data = module.bias.data.chunk(ranks, dim=0)[rank].clone()
    module.out_features //= ranks


def _keep_inputs(module: torch.nn.Linear, rank: int, ranks: int) -> None:
    module.weight.data = module.weight.data.chunk(ranks, dim=1)[rank].clone()
    if module.bias is not None and rank != 0:
        module.bias.data = torch.zeros_like(module.bias.data)  # it must be added once
    module.in_features //= ranks
    module.register_forward_hook(_add_up)


def _add_up(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(output)
    return output
