"""Recurrent states of a forward's sequences: gathered from the pool's slots for each layer, and put back behind it.

Stands where transformers' layers expect a cache, with use_cache off: attention layers get back what they bring, as
their K and V go into pages. Every sequence has a state from the beginning, all zeros, which is what a layer
without one computes with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

CONVOLUTION, RECURRENT = "conv", "recurrent"  # roles of a state layer's buffers
LayerViews = Mapping[str, torch.Tensor]  # (slots, *shape), by role


@dataclass(slots=True)
class GatheredLayer:
    """What a layer reads and writes; the keys are transformers', which allows several states a layer.

    conv_states: (B, channels, kernel). recurrent_states: (B, heads, …), where the layer has them.
    """

    conv_states: dict[int, torch.Tensor]
    recurrent_states: dict[int, torch.Tensor]
    record_past: bool = False


class SlotStates:
    """Of one forward over B sequences, whose states lie in these slots. One layer's states are gathered at a time."""

    def __init__(self, views: Mapping[int, LayerViews], slots: Mapping[int, torch.Tensor]) -> None:
        """views, slots: by layer; slots (B,)."""
        self._views = views
        self._slots = slots
        self._current = -1
        self._gathered: GatheredLayer | None = None

    def has_previous_state(self, layer_idx: int) -> bool:
        self._turn_to(layer_idx)
        return True

    @property
    def layers(self) -> Mapping[int, GatheredLayer]:
        assert self._gathered is not None
        return {self._current: self._gathered}

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[Any, Any]:
        return key, value

    def update_conv_state(self, new: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        """new: (B, channels, n). Returns it behind the old state, (B, channels, kernel + n)."""
        state = self._turn_to(layer_idx).conv_states[0]
        whole = torch.cat([state, new.to(state.dtype)], dim=-1)
        state.copy_(whole[..., -state.shape[-1] :])
        return whole

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        return self._turn_to(layer_idx).recurrent_states[0].copy_(new)

    def put_back(self) -> None:
        """Into the slots, what the last layer has computed; at the end of the forward."""
        if self._gathered is None:
            return
        views, slots = self._views[self._current], self._slots[self._current]
        views[CONVOLUTION][slots] = self._gathered.conv_states[0]
        if RECURRENT in views:
            views[RECURRENT][slots] = self._gathered.recurrent_states[0]
        self._current, self._gathered = -1, None

    def _turn_to(self, layer: int) -> GatheredLayer:
        if self._gathered is None or layer != self._current:
            self.put_back()
            views, slots = self._views[layer], self._slots[layer]
            recurrent = {0: views[RECURRENT][slots]} if RECURRENT in views else {}
            self._gathered = GatheredLayer({0: views[CONVOLUTION][slots]}, recurrent)
            self._current = layer
        return self._gathered
