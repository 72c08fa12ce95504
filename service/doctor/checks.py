"""All checks, in the order in which they are shown."""

from __future__ import annotations

from torpor.service.doctor import gpu, host, software
from torpor.service.doctor.facts import Facts
from torpor.service.doctor.findings import Check, Finding

CHECKS: tuple[Check, ...] = (
    gpu.driver,
    gpu.bindings,
    gpu.virtual_memory,
    gpu.sharing,
    gpu.sleep_and_wake,
    gpu.kernels,
    gpu.torch,
    host.memlock,
    host.huge_pages,
    host.memory_limit,
    host.shared_memory,
    host.journal,
    software.ray,
    software.ray_cluster,
    software.segments,
    software.caching,
    software.graph_registration,
    software.preloaded,
    software.launch_blocking,
)


def examine(facts: Facts) -> list[Finding]:
    return [check(facts) for check in CHECKS]
