"""What sleeps in a benchmark: so many bytes as one tensor, or as the tensors of a real model."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

GIB = 1 << 30
_LAYERS, _HIDDEN, _KV, _MLP, _VOCABULARY = 32, 4096, 1024, 14336, 128256  # Llama-3-8B's
MODEL_TENSORS = 9 * _LAYERS + 3
_ALIGNMENT_BYTES = 512  # what torch's allocator rounds to


@dataclass(frozen=True)
class Load:
    """keep: none or pinned. host_device: a name, where no GPU is asked for; its capacity is four times the load's."""

    size_bytes: int
    tensors: int = 1
    keep: str = "none"
    host_device: str = ""

    @classmethod
    def parsed(cls, text: str) -> Load:
        return cls(**json.loads(text))

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def sizes(self) -> list[int]:
        """Bytes of each tensor. A model's are in the proportions of Llama-3-8B's 291."""
        if self.tensors == 1:
            return [self.size_bytes]
        assert self.tensors == MODEL_TENSORS
        parameters = model_parameters()
        scale = self.size_bytes / sum(parameters)
        return [max(1, int(one * scale) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for one in parameters]


def model_parameters() -> list[int]:
    """How many each tensor of a dense model of 8 B parameters has."""
    layer = [
        _HIDDEN * _HIDDEN,
        _KV * _HIDDEN,
        _KV * _HIDDEN,
        _HIDDEN * _HIDDEN,
        _MLP * _HIDDEN,
        _MLP * _HIDDEN,
        _HIDDEN * _MLP,
        _HIDDEN,
        _HIDDEN,
    ]
    return [_VOCABULARY * _HIDDEN, *layer * _LAYERS, _HIDDEN, _VOCABULARY * _HIDDEN]
