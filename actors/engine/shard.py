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
    _keep(module, COLWISE, rank, ranks)
    module.out_features //= ranks


def _keep_inputs(module: torch.nn.Linear, rank: int, ranks: int) -> None:
    _keep(module, ROWWISE, rank, ranks)
    module.in_features //= ranks
    module.register_forward_hook(_add_up)


def _keep(module: torch.nn.Linear, style: str, rank: int, ranks: int) -> None:
    for name, parameter in module.named_parameters():
        parameter.data = _cut(style, name, parameter.data, rank, ranks).clone()


def _cut(style: str, name: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """rank's share of a linear layer's `weight` or `bias`; it may be a view."""
    if style == COLWISE:
        return whole.chunk(ranks, dim=0)[rank]
    if style == ROWWISE and name == "weight":
        return whole.chunk(ranks, dim=1)[rank]
    if style == ROWWISE and rank != 0:
        return torch.zeros_like(whole)  # a bias must be added once
    return whole


class Shares:
    """How the tensors of a checkpoint become one rank's parameters, for a model that `shard` has cut already."""

    def __init__(self, model: torch.nn.Module, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        plan: dict[str, str] = (getattr(model, "_tp_plan", None) or {}) if ranks > 1 else {}
        self._styles = {
            name: _style(plan, name) for name, module in model.named_modules() if _is_linear(module)
        }

    def whole_shape(self, name: str, share: torch.Size) -> tuple[int, ...]:
        """Of the tensor of which this rank has a share of that shape. name: of a parameter."""
        module, _, kind = name.rpartition(".")
        style, shape = self._styles.get(module, ""), list(share)
        if style == COLWISE:
            shape[0] *= self._ranks
        elif style == ROWWISE and kind == "weight":
            shape[1] *= self._ranks
        return tuple(shape)

    def is_cut(self, name: str) -> bool:
        return self._styles.get(name.rpartition(".")[0], "") in (COLWISE, ROWWISE)

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        module, _, kind = name.rpartition(".")
        return _cut(self._styles.get(module, ""), kind, whole, self._rank, self._ranks)


def _add_up(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(output)
    return output
