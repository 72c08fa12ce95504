"""Checks of Ray, and of settings in the environment that get in the way."""

from __future__ import annotations

from torpor.native.memory_pool import expandable_segments
from torpor.service.doctor.facts import Facts
from torpor.service.doctor.findings import Finding, fault, ok, warning

RAY_VERSION = "2.60.0"  # as pyproject.toml pins it
_ON = ("1", "true", "yes", "on")


def ray(facts: Facts) -> Finding:
    if not facts.ray.version:
        return fault("Ray", "not installed", f"pip install 'ray[default]=={RAY_VERSION}'")
    if facts.ray.version != RAY_VERSION:
        return fault(
            "Ray",
            f"{facts.ray.version}; torpor is made for {RAY_VERSION}",
            f"pip install 'ray[default]=={RAY_VERSION}', the same on every node",
        )
    return ok("Ray", facts.ray.version)


def ray_cluster(facts: Facts) -> Finding:
    address = facts.ray.address
    if not address:
        return ok("Ray cluster", "RAY_ADDRESS is not set: `torpor serve` starts a Ray of its own")
    if facts.ray.error:
        return fault(
            "Ray cluster",
            f"{address}: {facts.ray.error}",
            "correct or unset RAY_ADDRESS; Ray and Python must have the same versions there and here",
        )
    if "RAY_AUTH_MODE" not in facts.environment:
        return warning(
            "Ray cluster",
            f"{address} can be joined; RAY_AUTH_MODE is not set",
            "set RAY_AUTH_MODE (token or disabled) for every node and client alike: Ray's default has changed",
        )
    return ok("Ray cluster", f"{address} can be joined")


def segments(facts: Facts) -> Finding:
    variable = expandable_segments(facts.environment)
    if variable:
        return fault(
            "expandable_segments",
            f"{variable} turns them on: torch maps memory by itself then, and its pools cannot sleep",
            f"take expandable_segments out of {variable}",
        )
    return ok("expandable_segments", "off")


def caching(facts: Facts) -> Finding:
    if facts.environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        return fault(
            "torch's allocator",
            "PYTORCH_NO_CUDA_MEMORY_CACHING turns it off, and memory pools with it: what is in one cannot sleep",
            "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
        )
    return ok("torch's allocator", "as usual")


def graph_registration(facts: Facts) -> Finding:
    """A captured all-reduce over registered buffers may hang once they were mapped anew (F24)."""
    setting = facts.environment.get("NCCL_GRAPH_REGISTER")
    if setting == "0":
        return ok("NCCL_GRAPH_REGISTER", "0")
    told_on = setting is not None and setting.lower() in _ON
    if not told_on and len(facts.driver.gpus) < 2:
        return ok("NCCL_GRAPH_REGISTER", "not set; of no matter with less than two GPUs")
    return warning(
        "NCCL_GRAPH_REGISTER",
        f"{setting}" if setting is not None else "not set, and on by NCCL's default",
        "export NCCL_GRAPH_REGISTER=0 for all ranks: a captured all-reduce may hang after a sleep and wake",
    )


def preloaded(facts: Facts) -> Finding:
    """Two that manage the same memory."""
    if "torch_memory_saver" in facts.environment.get("LD_PRELOAD", ""):
        return warning(
            "LD_PRELOAD",
            "torch_memory_saver takes torch's allocations before torpor sees them",
            "leave torch_memory_saver out of LD_PRELOAD; torpor.native.MemorySaver does the same by tag",
        )
    return ok("LD_PRELOAD", "nothing in the way")


def launch_blocking(facts: Facts) -> Finding:
    if facts.environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return warning(
            "CUDA_LAUNCH_BLOCKING",
            "every kernel is waited for, and no graph can be captured",
            "unset CUDA_LAUNCH_BLOCKING once nothing is debugged any more",
        )
    return ok("CUDA_LAUNCH_BLOCKING", "off")
