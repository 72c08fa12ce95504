"""What users of sleep and wake have today. Each lives in a process of its own (subjects.py), so that no allocator meets
another: `sleep` and `wake` are what is timed, `change` writes other contents, `right` looks at them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from typing import Any

from load import Load

SAVER = "torch_memory_saver"


def find_saver() -> tuple[str, str]:
    """Its name with its version, and what its default hook wants in LD_PRELOAD. LookupError: why it cannot play."""
    if importlib.util.find_spec(SAVER) is None:
        raise LookupError(f"{SAVER}: not installed here")
    try:
        from torch_memory_saver.utils import get_binary_path_from_package

        library = get_binary_path_from_package(f"{SAVER}_hook_mode_preload")
    except (ImportError, RuntimeError) as error:
        raise LookupError(f"{SAVER}: {error}") from error
    return f"{SAVER} {importlib.metadata.version(SAVER)}", str(library)


def tensors_of(load: Load) -> list[Any]:
    import torch

    return [torch.ones(size, dtype=torch.uint8, device="cuda") for size in load.sizes()]


class Tensors:
    """A subject's own tensors, all bytes alike: 1 at first."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.byte = 1

    def change(self) -> None:
        self.byte += 1
        for tensor in self.tensors:
            tensor.fill_(self.byte)

    def right(self) -> bool:
        """Every byte, but 1 GiB at a time: comparing makes as many bytes anew, which are given back."""
        import torch

        right = all(
            bool((piece == self.byte).all()) for tensor in self.tensors for piece in tensor.split(1 << 30)
        )
        torch.cuda.empty_cache()
        return right

    def close(self) -> None:
        self.tensors.clear()


class MemorySaver(Tensors):
    """torch_memory_saver. hook: preload, its default, or torch. retain: keep the backup, for contents that do not
    change: its best setting there.
    """

    def __init__(self, load: Load, hook: str, retain: bool) -> None:
        super().__init__()
        from torch_memory_saver import torch_memory_saver as saver

        self.saver = saver
        if hook != "preload":
            saver.hook_mode = hook
        with saver.region(tag="all", enable_cpu_backup=load.keep != "none"):
            self.tensors = tensors_of(load)
        if retain:
            saver.retain_cpu_backup = True

    def sleep(self) -> None:
        self.saver.pause("all")

    def wake(self) -> None:
        self.saver.resume("all")


class CpuCopy(Tensors):
    """`tensor.cpu()`, and back."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.tensors = tensors_of(load)
        self.away: list[Any] = []

    def sleep(self) -> None:
        import torch

        self.away.extend(one.cpu() for one in self.tensors)
        self.tensors.clear()
        torch.cuda.empty_cache()

    def wake(self) -> None:
        self.tensors.extend(one.cuda() for one in self.away)
        self.away.clear()


class Checkpoint:
    """The driver's own process checkpoint; a child holds the memory, since a process cannot do it to itself."""

    def __init__(self, load: Load) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self._call(driver.cuInit(0))
        self.child = subprocess.Popen(
            [sys.executable, __file__, load.text()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "there"

    def sleep(self) -> None:
        driver, pid = self.driver, self.child.pid
        self._call(driver.cuCheckpointProcessLock(pid, driver.CUcheckpointLockArgs()))
        self._call(driver.cuCheckpointProcessCheckpoint(pid, driver.CUcheckpointCheckpointArgs()))

    def wake(self) -> None:
        driver, pid = self.driver, self.child.pid
        self._call(driver.cuCheckpointProcessRestore(pid, driver.CUcheckpointRestoreArgs()))
        self._call(driver.cuCheckpointProcessUnlock(pid, driver.CUcheckpointUnlockArgs()))

    def change(self) -> None:
        self._ask("change")

    def right(self) -> bool:
        return self._ask("right") == "True"

    def close(self) -> None:
        self.child.kill()
        self.child.wait()

    def _ask(self, what: str) -> str:
        assert self.child.stdin is not None
        self.child.stdin.write(what + "\n")
        self.child.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def _call(self, result: tuple[Any, ...]) -> None:
        if result[0] != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"process checkpoint: {result[0]!r}")


def hold(load: Load) -> None:
    """The child of `Checkpoint`."""
    kept = Tensors()
    kept.tensors = tensors_of(load)
    print("there", flush=True)
    for line in sys.stdin:
        print(getattr(kept, line.strip())(), flush=True)


if __name__ == "__main__":
    hold(Load.parsed(sys.argv[1]))
