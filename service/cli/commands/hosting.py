"""Commands about this machine and the cluster: serve, apply, version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torpor.service.app import service_version
from torpor.service.cli.apply_command import Wishes, run_apply
from torpor.service.cli.options import DryRun, Json
from torpor.service.cli.output import Output
from torpor.service.cli.serve_command import run_serve


def serve(
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file. Without one: the small default model.")
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on; without tokens a loopback one.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="0 = any free one.")] = None,
    connect: Annotated[
        bool, typer.Option("--connect", help="Be a front end of a cluster that runs, and start no models.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Argument(
            help="With --connect: the Ray cluster, HOST:PORT. Default: ray.address of the settings."
        ),
    ] = None,
) -> None:
    """Start the models and serve until SIGINT or SIGTERM; or, with --connect, serve those of a running cluster."""
    if address is not None and not connect:
        raise typer.BadParameter("an address is for --connect only", param_hint="ADDRESS")
    raise typer.Exit(run_serve(config, host, port, (address or "") if connect else None))


def apply(
    file: Annotated[Path, typer.Option("--file", "-f", help="The cluster as it is to be, a YAML file.")],
    address: Annotated[
        str | None,
        typer.Option("--address", help="The Ray cluster, HOST:PORT. Default: ray.address of the file."),
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Delete models that are not in the file.")] = False,
    dry_run: DryRun = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the models have loaded.")] = True,
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds to wait for that.")] = 600.0,
    json: Json = False,
) -> None:
    """Make a running Ray cluster as a file says: create, change and recreate models; start the coordinator if need be."""
    wishes = Wishes(file, address, dry_run, prune, json, timeout if wait else 0.0)
    raise typer.Exit(run_apply(wishes))


def version(json: Json = False) -> None:
    """Print the version."""
    Output(json).line({"version": service_version()}, service_version())
