"""The functions that torch's allocators call by name."""

from __future__ import annotations

import subprocess
import sys

STORY = """
import ctypes
import os
from torpor.native import Device, Ledger, Misuse, _core

ledger = Ledger(Device.host(f"hooks-{os.getpid()}", 16 << 20))
arenas = [ledger.create_arena("weights", 4 << 20, name=f"arena {number}") for number in range(65)]
called = ctypes.CDLL(_core.__file__)
names = [arena.hook() for arena in arenas[:64]]
assert len(set(names)) == 64
for allocate, free in names:
    getattr(called, allocate), getattr(called, free)
try:
    arenas[64].hook()
except Misuse as error:
    assert "all 64" in str(error), error
else:
    raise AssertionError("one hook of two arenas")
print("done")
"""


def test_64_arenas_of_a_process_have_functions_of_their_own() -> None:
    # In a process of its own: hooks are for good.
    done = subprocess.run([sys.executable, "-c", STORY], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr
