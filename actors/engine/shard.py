"""Tensor parallelism by slicing a loaded module after the plan that its transformers class declares.

Column-wise layers keep a share of their outputs, row-wise layers a share of their inputs and add up over the ranks.
So do experts, whose weights are one tensor for all of them: every rank has a share of each. Embeddings and the output
head stay whole on every rank: the rows of the result are then the same everywhere, and the leader samples without
another collective. What a plan gathers again, such as layers with states, stays whole, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torpor.actors.engine.errors import ModelRefused

COLWISE, ROWWISE = "colwise", "rowwise"
PACKED = "packed_colwise"  # two halves of outputs, of which each is cut
EXPERTS = "moe_tp_experts"  # a module that adds up, of parameters with plans of their own
# Gates of one output beside experts, which plans leave out.
ONE_OUTPUT = "shared_expert_gate"
WHOLE = ("embedding_rowwise", "colwise_gather_output", "colwise_rep", "replicated_with_grad_allreduce")


def shard(model: torch.nn.Module, rank: int, ranks: int) -> None:
    """Slice `model` in place to rank's share; collectives go through the default process group."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    styles = {name: _style(plan, name) for name, module in model.named_modules() if _is_linear(module)}
    unplanned = sorted(
        name for name, style in styles.items() if not style and not name.endswith(("lm_head", ONE_OUTPUT))
    )
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
    for name, module in model.named_modules():
        if _style(plan, name) == EXPERTS:
            for own, parameter in module.named_parameters(recurse=False):
                style = _style(plan, f"{name}.{own}")
                if style not in (PACKED, ROWWISE):
                    raise ModelRefused(
                        f"{type(model).__name__} shards {name}.{own} as {style!r}, which is not served; use 1 rank"
                    )
                parameter.data = _cut_experts(style, parameter.data, rank, ranks).clone()
            module.register_forward_hook(_add_up)


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


def _cut_experts(style: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """rank's share of (experts, outputs, inputs), both halves of the outputs, or the inputs; it may be a view."""
    if style == ROWWISE:
        return whole.chunk(ranks, dim=2)[rank]
    halves = whole.chunk(2, dim=1)
    return torch.cat([half.chunk(ranks, dim=1)[rank] for half in halves], dim=1)


class Shares:
    """How the tensors of a checkpoint become one rank's parameters, for a model that `shard` has cut already."""

    def __init__(self, model: torch.nn.Module, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        plan: dict[str, str] = (getattr(model, "_tp_plan", None) or {}) if ranks > 1 else {}
        modules = dict(model.named_modules())
        self._styles = {name: _style(plan, name) for name, module in modules.items() if _is_linear(module)}
        self._experts = {
            f"{name}.{own}": _style(plan, f"{name}.{own}")
            for name, module in modules.items()
            if _style(plan, name) == EXPERTS
            for own, _ in module.named_parameters(recurse=False)
        }

    def whole_shape(self, name: str, share: torch.Size) -> tuple[int, ...]:
        """Of the tensor of which this rank has a share of that shape. name: of a parameter."""
        module, _, kind = name.rpartition(".")
        style, shape = self._styles.get(module, ""), list(share)
        if name in self._experts:
            shape[1 if self._experts[name] == PACKED else 2] *= self._ranks
        elif style == COLWISE:
            shape[0] *= self._ranks
        elif style == ROWWISE and kind == "weight":
            shape[1] *= self._ranks
        return tuple(shape)

    def is_cut(self, name: str) -> bool:
        return name in self._experts or self._styles.get(name.rpartition(".")[0], "") in (COLWISE, ROWWISE)

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        if name in self._experts:
            return _cut_experts(self._experts[name], whole, self._rank, self._ranks)
        module, _, kind = name.rpartition(".")
        return _cut(self._styles.get(module, ""), kind, whole, self._rank, self._ranks)


def _add_up(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(output)
    return output
