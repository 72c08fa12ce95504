"""Shows how far an operation is, while its call waits for the end: bars on a terminal, else lines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from torpor.service.cli.boards import board_on
from torpor.service.client.blocking import Client
from torpor.service.client.errors import ClientError
from torpor.service.progress import Board, of_operation

PATIENCE_S = 0.3  # what is over by then shows nothing
POLL_S = 0.25
_LISTED = 20


@contextmanager
def following(
    client: Client, kind: str, model: str | None, shown: bool, console: Console | None = None
) -> Iterator[None]:
    """Inside the block the call waits. shown: False for scripts, and where nobody waits."""
    if not shown:
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(
        target=_watch,
        args=(client, kind, model, console or Console(stderr=True), over),
        name="torpor-progress",
        daemon=True,
    )
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch(client: Client, kind: str, model: str | None, console: Console, over: threading.Event) -> None:
    if over.wait(PATIENCE_S):
        return
    with board_on(console) as board:
        shown: set[str] = set()
        while True:
            shown = _look(client, kind, model, board, shown)
            if over.wait(POLL_S):
                return


def _look(client: Client, kind: str, model: str | None, board: Board, shown: set[str]) -> set[str]:
    """Those of this kind that run; whose they are cannot be told, and the waiting call has the true end."""
    try:
        records = client.operations(None if model == "*" else model, _LISTED)
    except ClientError:
        return shown  # the call that waits will tell
    running = {one["id"]: one for one in records if one["kind"] == kind and one["state"] == "running"}
    for gone in shown - running.keys():
        board.end(gone)
    for name, record in running.items():
        board.show(name, of_operation(record))
    return set(running)
