"""How a model of experts computes within a captured graph: nothing may be counted on the host there.

transformers has two ways that fit. `batched_mm` copies the weights of each line's experts, which a few lines can
afford; `grouped_mm` sorts the lines by expert on the device, but only where torch has a kernel for it: in bfloat16 on
GPUs of compute capability 9 and 10 (aten's GroupedBlas.cpp). Its way elsewhere reads the counts on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torpor.actors.engine.families import Family

COPIED, GROUPED = "batched_mm", "grouped_mm"  # as transformers names them
MOST_COPIED_BYTES = 1 << 30  # of experts' weights, in one layer
GROUPS_ON_DEVICE = (9, 10)  # major compute capabilities


def has_experts(family: Family, config: Any) -> bool:
    return any(getattr(config, name, 0) for name in family.experts)


class CapturedExperts:
    """The way that each number of lines takes. expert_bytes: of the largest one's weights."""

    def __init__(self, module: Any, experts_per_line: int, expert_bytes: int, groups_on_device: bool) -> None:
        self._module = module
        self._most_copied = MOST_COPIED_BYTES // max(experts_per_line * expert_bytes, 1)
        self._groups_on_device = groups_on_device

    @property
    def most_lines(self) -> int | None:
        """None: any number."""
        return None if self._groups_on_device else self._most_copied

    def way(self, lines: int) -> str:
        return COPIED if lines <= self._most_copied else GROUPED

    @contextmanager
    def computing(self, lines: int) -> Iterator[None]:
        """Forwards within take the way of so many lines."""
        before = self._module.get_experts_implementation()
        self._module.set_experts_implementation(self.way(lines))
        try:
            yield
        finally:
            self._module.set_experts_implementation(before)


def captured_experts(module: Any, config: Any, dtype: torch.dtype, device: torch.device) -> CapturedExperts:
    """Of a model that `has_experts`."""
    groups = (
        dtype is torch.bfloat16
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] in GROUPS_ON_DEVICE
    )
    return CapturedExperts(module, int(config.num_experts_per_tok), _expert_bytes(module), groups)


def _expert_bytes(module: torch.nn.Module) -> int:
    sizes = (
        sum(parameter[0].nbytes for parameter in one.parameters(recurse=False) if parameter.dim() == 3)
        for one in module.modules()
        if hasattr(one, "num_experts")
    )
    return max(sizes, default=0)
