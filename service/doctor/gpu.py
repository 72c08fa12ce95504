"""Checks of the driver, the GPUs, and what was built for them."""

from __future__ import annotations

from torpor.service.doctor.facts import Facts
from torpor.service.doctor.findings import Finding, fault, ok, warning

LEAST_CUDA = (12, 0)  # cuGetProcAddress_v2 and versioned entries
BATCH_COPIES_CUDA = (13, 0)
LEAST_CAPABILITY = (8, 0)  # what kernels are built for
_PROHIBITED, _ONE_PROCESS = 2, 3


def driver(facts: Facts) -> Finding:
    seen = facts.driver
    if not facts.has_gpu:
        return ok("driver", "no GPU here: host devices play it")
    if facts.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return warning(
            "driver",
            "CUDA_VISIBLE_DEVICES hides all GPUs from this process",
            "unset CUDA_VISIBLE_DEVICES, or leave it so to work with host devices",
        )
    if not seen.bindings and facts.core.device == "cuda":
        return ok("driver", "it works; more about it only with cuda-python")
    if seen.version is None or (seen.bindings and not seen.gpus):
        return fault(
            "driver",
            f"the machine has {seen.device_files} GPU(s), and the driver shows none: {seen.error or 'no answer'}",
            "look at `nvidia-smi`; install the NVIDIA driver, or start the container with its GPUs (--gpus all)",
        )
    if seen.version < LEAST_CUDA:
        return fault("driver", f"for CUDA {_text(seen.version)}", "install a driver for CUDA 12.0 or later")
    if seen.version < BATCH_COPIES_CUDA:
        return warning(
            "driver",
            f"for CUDA {_text(seen.version)}: scattered pages are copied one by one",
            "install a driver for CUDA 13.0 or later (580 or above)",
        )
    names = ", ".join(gpu.name for gpu in seen.gpus)
    return ok("driver", f"for CUDA {_text(seen.version)}; {names}")


def bindings(facts: Facts) -> Finding:
    if facts.driver.bindings:
        return ok("cuda-python", facts.driver.bindings)
    if not facts.has_gpu:
        return ok("cuda-python", "not installed, and not needed without a GPU")
    return warning(
        "cuda-python",
        "not installed: what the driver supports is not known",
        "pip install 'torpor[gpu]', or pip install 'cuda-python>=13.0,<14'",
    )


def virtual_memory(facts: Facts) -> Finding:
    """Without it nothing can be given back at fixed addresses."""
    if not facts.driver.gpus:
        return ok("virtual memory", "no GPU to ask")
    without = [gpu.name for gpu in facts.driver.gpus if not gpu.virtual_memory]
    if without:
        return fault(
            "virtual memory",
            f"not supported by {', '.join(without)}",
            "use another GPU, or a driver in its usual mode (vGPU profiles and WSL may lack it)",
        )
    return ok("virtual memory", f"supported by {len(facts.driver.gpus)} GPU(s)")


def sharing(facts: Facts) -> Finding:
    prohibited = [gpu.name for gpu in facts.driver.gpus if gpu.compute_mode == _PROHIBITED]
    alone = [gpu.name for gpu in facts.driver.gpus if gpu.compute_mode == _ONE_PROCESS]
    if prohibited:
        return fault(
            "compute mode", f"{', '.join(prohibited)}: nobody may compute", "nvidia-smi -c DEFAULT, as root"
        )
    if alone:
        return warning(
            "compute mode",
            f"{', '.join(alone)}: one process alone may use it, so that models cannot share it",
            "nvidia-smi -c DEFAULT, as root",
        )
    return ok("compute mode", "shared" if facts.driver.gpus else "no GPU to ask")


def sleep_and_wake(facts: Facts) -> Finding:
    """The one check that does the thing itself."""
    core = facts.core
    if not core.error:
        return ok("sleep and wake", f"a region slept and woke on a {core.device} device")
    if core.full:
        return warning(
            "sleep and wake",
            f"no room on the {core.device} device to try it: {core.error}",
            "end or sleep what has its memory, and ask again",
        )
    mend = (
        "look at `nvidia-smi` and the driver"
        if core.device == "cuda"
        else "look at the error, and at memory limits"
    )
    return fault("sleep and wake", f"failed on a {core.device} device: {core.error}", mend)


def kernels(facts: Facts) -> Finding:
    old = [gpu.name for gpu in facts.driver.gpus if gpu.capability < LEAST_CAPABILITY]
    if facts.core.device != "cuda":
        return ok("kernels", "not needed on host devices")
    if facts.core.error:
        return warning("kernels", "not known while sleep and wake fail", "mend that first")
    if facts.core.kernels != "loaded":
        said = f": {', '.join(old)} is older than they are built for" if old else ""
        return warning(
            "kernels",
            f"{facts.core.kernels or 'none'}{said}; small pages and checksums are slow",
            "install nvcc (CUDA 12.8 or later) and build torpor anew: pip install --no-deps --force-reinstall FOLDER",
        )
    return ok("kernels", "loaded")


def torch(facts: Facts) -> Finding:
    if not facts.torch.version:
        return fault("torch", "not installed", "pip install torch")
    if not facts.has_gpu:
        return ok("torch", facts.torch.version)
    if facts.torch.cuda is None:
        return fault(
            "torch",
            f"{facts.torch.version} was built for CPUs alone, and here is a GPU",
            "pip install torch, from an index that has it for CUDA",
        )
    driver_version = facts.driver.version
    if driver_version is not None and facts.torch.cuda[0] > driver_version[0]:
        return fault(
            "torch",
            f"{facts.torch.version} is for CUDA {_text(facts.torch.cuda)}, the driver for {_text(driver_version)}",
            "install a newer driver, or torch for the driver's CUDA",
        )
    return ok("torch", f"{facts.torch.version} for CUDA {_text(facts.torch.cuda)}")


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
