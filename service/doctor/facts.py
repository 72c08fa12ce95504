"""What is known of a machine. Probes fill it (probe.py), checks only read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Gpu:
    """As the driver describes it. compute_mode: 0 shared, 2 prohibited, 3 for one process alone."""

    name: str
    capability: tuple[int, int]
    virtual_memory: bool
    compute_mode: int = 0


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """The NVIDIA driver's word, by cuda-python. device_files: how many GPUs the kernel shows as /dev/nvidia0, …

    bindings: cuda-python's version, empty where it is missing. version: CUDA's, such as (13, 0); None without a driver.
    error: why the driver did not answer.
    """

    device_files: int = 0
    bindings: str = ""
    version: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class CoreFacts:
    """What the native core said when a small region slept and woke on a device of this machine.

    device: "cuda" or "host". error: what it raised, empty where the contents came back and the memory was free
    meanwhile. full: it was for want of memory. kernels: as Device.kernels says.
    """

    device: str
    error: str = ""
    full: bool = False
    kernels: str = ""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """version: empty where torch is missing. cuda: that it was built for, such as (13, 0); None: for CPUs alone."""

    version: str = ""
    cuda: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Of this process and machine; None where it is not known, or where there is no limit.

    huge_pages: the mode of transparent huge pages. limit_bytes: what all cgroups and the machine allow, less a reserve.
    """

    memlock_bytes: int | None = None
    huge_pages: str | None = None
    limit_bytes: int | None = None
    shm_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class JournalFacts:
    """Where the coordinator's journal will be: its folder, or the nearest one above it that is there."""

    folder: str
    writable: bool = True
    filesystem: str = ""


@dataclass(frozen=True, slots=True)
class RayFacts:
    """version: empty where Ray is missing. address: RAY_ADDRESS. error: why that cluster cannot be joined."""

    version: str = ""
    address: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    driver: DriverFacts
    core: CoreFacts
    torch: TorchFacts
    host: HostFacts
    journal: JournalFacts
    ray: RayFacts
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        """By any sign: the kernel shows one, also when nothing else does."""
        return bool(self.driver.device_files or self.driver.gpus or self.core.device == "cuda")
