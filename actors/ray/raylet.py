"""A worker's bond with the raylet that made it.

By itself a worker notices only after a minute that its node's raylet has been killed. Until then a rank would hold
its device's memory against those that replace it, and a coordinator its journal.
"""

from __future__ import annotations

import os
import threading
import time

POLL_S = 0.5


def end_with_raylet() -> None:
    """From now on this process ends soon after its parent, without any clean-up: the kernel gives its memory back."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="raylet watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)
