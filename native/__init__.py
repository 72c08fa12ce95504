"""The native core: virtual memory, KV manager and one transaction over both. Usable without the rest of torpor."""

from torpor.native._core import (
    Buffer,
    Device,
    FaultyDevice,
    HostPool,
    KvManager,
    LayerSpec,
    Plan,
    Region,
    Registration,
    Sequence,
    cuda_device_count,
)
from torpor.native.errors import (
    ContentsCorrupt,
    DeviceBusy,
    DeviceError,
    Misuse,
    OutOfDeviceMemory,
    OutOfDisk,
    OutOfHostMemory,
    OutOfMemory,
    Stopped,
    TorporError,
)
from torpor.native.ledger import Ledger

__all__ = [
    "Buffer",
    "ContentsCorrupt",
    "Device",
    "DeviceBusy",
    "DeviceError",
    "FaultyDevice",
    "HostPool",
    "KvManager",
    "LayerSpec",
    "Ledger",
    "Misuse",
    "OutOfDeviceMemory",
    "OutOfDisk",
    "OutOfHostMemory",
    "OutOfMemory",
    "Plan",
    "Region",
    "Registration",
    "Sequence",
    "Stopped",
    "TorporError",
    "cuda_device_count",
]
