"""Shows on a terminal how far an operation is, while its call waits for the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from torpor.service.client.blocking import Client
from torpor.service.client.errors import ClientError

PATIENCE_S = 0.3  # what is over by then draws nothing
POLL_S = 0.25
_LISTED = 20
# The phases of each kind in their order; of others it is not known how many there will be.
PHASES: Mapping[str, tuple[str, ...]] = {
    "sleep": ("preflight", "drain", "stage", "commit", "publish"),
    "wake": ("preflight", "stage", "commit", "publish"),
    "update": ("preflight", "drain", "stage", "commit", "publish"),
}


@contextmanager
def following(
    client: Client, kind: str, model: str | None, shown: bool, console: Console | None = None
) -> Iterator[None]:
    """Inside the block the call waits. shown: False for scripts, and where nobody waits. Nothing but on a terminal."""
    console = console or Console(stderr=True)
    if not (shown and console.is_terminal):
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(client, kind, model, console, over), name="torpor-progress", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def make_progress(console: Console, shown: bool = True) -> Progress:
    """Gone when it is done; nothing at all but on a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))


def _watch(client: Client, kind: str, model: str | None, console: Console, over: threading.Event) -> None:
    if over.wait(PATIENCE_S):
        return
    order = PHASES.get(kind)
    with make_progress(console) as progress:
        task = progress.add_task(f"{kind} {model or ''}".strip(), total=len(order) if order else None)
        while True:
            try:
                found = _running(client.operations(model, _LISTED), kind)
            except ClientError:
                found = None  # the call that waits will tell
            if found is not None:
                phase = found["phases"][-1]["name"] if found["phases"] else "waiting for its turn"
                progress.update(task, description=f"{kind} {found['model']}: {phase}")
                if order and phase in order:
                    progress.update(task, completed=order.index(phase))
            if over.wait(POLL_S):
                return


def _running(operations: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    """The newest of this kind; whose it is cannot be told, and the waiting call has the true end."""
    return next((one for one in operations if one["kind"] == kind and one["state"] == "running"), None)
