"""The native core: virtual memory, KV manager and one transaction over both. Usable without the rest of torpor."""

from torpor.native._core import (
    Arena,
    Buffer,
    Device,
    DeviceEvent,
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
    CodecRefused,
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
from torpor.native.memory_pool import MemoryPool
from torpor.native.saver import MemorySaver

__all__ = [
    "Arena",
    "Buffer",
    "CodecRefused",
    "ContentsCorrupt",
    "Device",
    "DeviceBusy",
    "DeviceError",
    "DeviceEvent",
    "FaultyDevice",
    "HostPool",
    "KvManager",
    "LayerSpec",
    "Ledger",
    "MemoryPool",
    "MemorySaver",
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
