"""Commands that try this machine: bench and doctor."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from torpor.service.cli import tables
from torpor.service.cli.boards import make_progress
from torpor.service.cli.options import Json
from torpor.service.cli.output import Output
from torpor.service.units import parse_size_bytes


def bench(
    size: Annotated[str, typer.Option(metavar="BYTES", help="Of each subject, like 256MiB.")] = "256MiB",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="That are counted; one more goes before.")] = 7,
    device: Annotated[
        str, typer.Option(metavar="auto|host|cuda", help="auto: a GPU if there is one.")
    ] = "auto",
    json: Json = False,
) -> None:
    """Time sleep and wake of as much memory here, beside the bare calls and copies that are the limit.

    The subjects are there at once, and play in turns: on a host device they take six times the size of the machine's
    memory; on a GPU four times the size of its own, and twice that of the machine's.
    """
    # Here, so that the other commands do not wait for torch and the native core.
    from torpor.service.bench.rounds import WARM_UP, measure, pick_device

    try:
        size_bytes = parse_size_bytes(size)
        if size_bytes < 1 << 20:
            raise ValueError("a size below 1 MiB measures calls, not memory")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--size") from None
    kind = pick_device(device)
    with make_progress(Console(stderr=True), shown=not json) as progress:
        task = progress.add_task("measuring", total=WARM_UP + rounds)
        rows = measure(kind, size_bytes, rounds, lambda done: progress.update(task, completed=done))
    Output(json).show({"device": kind, "size_bytes": size_bytes, "rows": rows}, tables.bench)


def doctor(json: Json = False) -> None:
    """What of this machine is in the way, and how it is mended. Exits 1 where something is a fault."""
    # Here, so that the other commands do not wait for the native core.
    from torpor.service.cli.doctor_command import run_doctor

    raise typer.Exit(run_doctor(json))
