"""Where progress is seen: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from torpor.service.progress import Board, Stage


class Lines:
    """A line whenever there is something new to say. write: takes one."""

    live = False

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._told: dict[str, str] = {}

    def say(self, text: str) -> None:
        self._write(text)

    def show(self, name: str, stage: Stage) -> None:
        if self._told.get(name) != stage.text:
            self._told[name] = stage.text
            self._write(stage.text)

    def end(self, name: str) -> None:
        self._told.pop(name, None)


class Bars:
    """A bar for each name, below the lines that stay."""

    live = True

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def say(self, text: str) -> None:
        self._progress.console.print(f"torpor: {text}", markup=False, highlight=False, soft_wrap=True)

    def show(self, name: str, stage: Stage) -> None:
        text = escape(stage.text)
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(text, total=stage.total)
        self._progress.update(self._bars[name], description=text, completed=stage.done, total=stage.total)

    def end(self, name: str) -> None:
        bar = self._bars.pop(name, None)
        if bar is not None:
            self._progress.remove_task(bar)


@contextmanager
def board_on(console: Console, bars: bool = True) -> Iterator[Board]:
    """Bars are gone after the block. bars False: lines also on a terminal."""
    if not (bars and console.is_terminal):
        yield Lines(
            lambda text: console.print(f"torpor: {text}", markup=False, highlight=False, soft_wrap=True)
        )
        return
    with make_progress(console) as progress:
        yield Bars(progress)


def make_progress(console: Console, shown: bool = True) -> Progress:
    """Gone when it is done; nothing at all but on a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Not redirected: what else is printed meanwhile goes where it was to go, and may be no terminal.
    return Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not (shown and console.is_terminal),
    )
