"""Move a torch module's storages into ledger regions: addresses fixed, ties kept, one storage in flight at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torpor.native._core import Region
from torpor.native.errors import Misuse

if TYPE_CHECKING:
    import torch

    from torpor.native.ledger import Ledger

ALIGNMENT_BYTES = 256


@dataclass(slots=True)
class _Group:
    """The tensors that share one storage, and the bytes of it that they reach: [low, high)."""

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)  # each once, however many modules hold it
    has_parameter: bool = False
    low: int = 0
    high: int = 0

    def add(self, name: str, tensor: torch.Tensor, is_parameter: bool) -> None:
        low, high = _extent(tensor)
        self.low = min(self.low, low) if self.tensors else low
        self.high = max(self.high, high)
        self.has_parameter |= is_parameter
        self.names.append(name)
        if not any(known is tensor for known in self.tensors):
            self.tensors.append(tensor)


@dataclass(frozen=True, slots=True)
class Adopted:
    """Where a module's tensors lie now. weights is None for a module without parameters, buffers without buffers."""

    weights: Region | None
    buffers: Region | None
    parameter_bytes: int
    buffer_bytes: int
    tensors: tuple[str, ...]


def adopt(ledger: Ledger, module: torch.nn.Module, tag: str = "weights", restore: str = "pinned") -> Adopted:
    """Parameters go into a region of `tag`, buffers into one that keeps its contents in every mode (S3).

    restore: the mode of a sleep that names none, and of a backup made before it. Tensors keep their shapes, strides
    and ties; a buffer that shares a parameter's storage goes with it. Misuse for tensors without bytes of their own
    (meta, sparse, wrapper classes). OutOfDeviceMemory before anything has moved.
    """
    groups = _groups(module)
    weights = [group for group in groups if group.has_parameter]
    buffers = [group for group in groups if not group.has_parameter]
    names = tuple(sorted(name for group in groups for name in group.names))
    weight_bytes, buffer_bytes = _total_bytes(weights), _total_bytes(buffers)
    weight_region = buffer_region = None
    if weight_bytes:
        weight_region = ledger.create_region(
            tag, weight_bytes, name="parameters", restore=restore, immutable=True
        )
    if buffer_bytes:
        buffer_region = ledger.create_region(tag, buffer_bytes, name="buffers", preserve_always=True)
    del groups
    _move(weights, weight_region)
    _move(buffers, buffer_region)
    adopted = Adopted(weight_region, buffer_region, weight_bytes, buffer_bytes, names)
    check_adopted(module, adopted)
    return adopted


def check_adopted(module: torch.nn.Module, adopted: Adopted) -> None:
    """Every tensor of the module lies in one of the regions (F28); Misuse names the first that does not."""
    regions = [region for region in (adopted.weights, adopted.buffers) if region is not None]
    for name, tensor, _ in _tensors(module):
        if tensor.numel() == 0:
            continue
        low, high = _extent(tensor)
        start = tensor.untyped_storage().data_ptr()
        inside = any(
            region.address <= start + low and start + high <= region.address + region.size_bytes
            for region in regions
        )
        if not inside:
            raise Misuse(
                f"{name} does not lie in the regions that adopted its module; adopt before replacing tensors"
            )


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, local tensor, is parameter): parameters, buffers, and tensors kept as plain attributes."""
    import torch

    for prefix, owner in module.named_modules():
        start = f"{prefix}." if prefix else ""
        found: list[tuple[str, Any, bool]] = [
            (name, value, True) for name, value in owner._parameters.items()
        ]
        found += [(name, value, False) for name, value in owner._buffers.items()]
        found += [
            (name, value, False) for name, value in vars(owner).items() if isinstance(value, torch.Tensor)
        ]
        for name, value, is_parameter in found:
            if value is not None:
                yield start + name, _local(value), is_parameter


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's own shard: setting `.data` on the DTensor itself would silently change nothing."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _groups(module: torch.nn.Module) -> list[_Group]:
    import torch

    groups: dict[int, _Group] = {}
    for name, tensor, is_parameter in _tensors(module):
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise Misuse(f"{name} ({type(tensor).__name__}, {tensor.device}) has no plain storage to adopt")
        if tensor.numel():
            groups.setdefault(tensor.untyped_storage().data_ptr(), _Group()).add(name, tensor, is_parameter)
    return list(groups.values())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of what the tensor reaches in its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = int(tensor.storage_offset()) * tensor.element_size()
    return low, low + (int(last) + 1) * tensor.element_size()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _total_bytes(groups: list[_Group]) -> int:
    return sum(_aligned(group.high - group.low // ALIGNMENT_BYTES * ALIGNMENT_BYTES) for group in groups)


def _move(groups: list[_Group], region: Region | None) -> None:
    import torch
    from torch.utils.dlpack import from_dlpack

    if region is None:
        return
    pool = from_dlpack(region)
    offset = 0
    while groups:
        group = groups.pop(0)
        low = (
            group.low // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        )  # so that every view stays aligned to its own type
        size = group.high - low
        with torch.no_grad():
            first = group.tensors[0]
            source = torch.empty(0, dtype=torch.uint8, device=first.device)
            source.set_(first.untyped_storage(), low, (size,), (1,))
            pool[offset : offset + size].copy_(source)
            del source, first
            for tensor in group.tensors:
                view = torch.empty(0, dtype=tensor.dtype, device=pool.device)
                start = offset - low + tensor.storage_offset() * tensor.element_size()
                view.set_(
                    pool.untyped_storage(), start // tensor.element_size(), tensor.shape, tensor.stride()
                )
                tensor.data = view
        offset += _aligned(size)
