"""Where the ranks of a model meet: ports that will still be free when a rank gets to listen there."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 20_000  # Ray's workers have those below
TRIES = 200


def free_addresses(host: str, count: int = 2) -> list[str]:
    """count times "host:port", all different.

    Models take a while to load before anybody listens, and until then every connection that leaves the machine may
    be given a port of the kernel's ephemeral range. So these lie outside it, where there is room.
    """
    with ExitStack() as held:  # all, while choosing
        return [f"{host}:{_bound(held, host)}" for _ in range(count)]


def _bound(held: ExitStack, host: str) -> int:
    for port in (*_outside(), 0):
        one = held.enter_context(socket.socket())
        try:
            one.bind((host, port))
        except OSError:
            if port == 0:
                raise
            continue
        return int(one.getsockname()[1])
    raise AssertionError("port 0 is bound or raises")


def _outside() -> Iterator[int]:
    """Ports to try, by chance: models that load at once would try the same ones."""
    try:
        first, last = map(int, EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return
    outside = [*range(LOWEST, first), *range(max(last + 1, LOWEST), 1 << 16)]
    yield from random.sample(outside, min(TRIES, len(outside)))
