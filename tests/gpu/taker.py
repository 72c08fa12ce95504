"""Another process that takes GPU memory and gives it back: CUDA's driver alone, no torch and none of our code.

As a program it reads `take BYTES`, `give` and `free` from stdin, and answers each with a number: the driver's status, or
free bytes. As a module, `Taker` is such a process.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import TracebackType

OUT_OF_MEMORY = 2


class Taker:
    def __enter__(self) -> Taker:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()  # its context has its memory now
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()

    def take(self, size_bytes: int) -> int:
        """The driver's status: 0, or OUT_OF_MEMORY. The memory is filled, so that whoever reads it later is found."""
        return self._ask(f"take {size_bytes}")

    def give(self) -> None:
        """All that was taken, and the driver has it when this returns."""
        assert self._ask("give") == 0

    def free_bytes(self) -> int:
        return self._ask("free")

    def _ask(self, line: str) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the other process has ended"
        return int(line)


def main() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for status in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        cuda.cuCtxSetCurrent(context),
    ):
        if status != 0:
            sys.exit(f"the driver answers {status}")
    print(0, flush=True)
    taken: list[ctypes.c_uint64] = []
    for line in sys.stdin:
        word, *number = line.split()
        if word == "take":
            block = ctypes.c_uint64()
            status = cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(int(number[0])))
            if status == 0:
                taken.append(block)
                status = cuda.cuMemsetD8_v2(block, ctypes.c_ubyte(0xA5), ctypes.c_size_t(int(number[0])))
                status = status or cuda.cuCtxSynchronize()
            print(status, flush=True)
        elif word == "give":
            print(max((cuda.cuMemFree_v2(taken.pop()) for _ in range(len(taken))), default=0), flush=True)
        else:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
            print(free.value, flush=True)


if __name__ == "__main__":
    main()
