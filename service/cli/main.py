"""The commands, and what they exit with: 0 done, 1 failed, 2 usage, 3 rejected."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from torpor.service.app import service_version
from torpor.service.cli import tables
from torpor.service.cli.apply_command import Wishes, run_apply
from torpor.service.cli.options import (
    DryRun,
    Json,
    Model,
    Tags,
    Timeout,
    TokenFile,
    Url,
    Verify,
    Wait,
    read_token,
    tag_and_mode,
)
from torpor.service.cli.output import Output
from torpor.service.cli.serve_command import run_serve
from torpor.service.client.blocking import Client
from torpor.service.client.calls import DEFAULT_URL
from torpor.service.client.errors import (
    BadRequest,
    ClientError,
    Denied,
    NotFound,
    ProblemError,
    Rejected,
    Unavailable,
)
from torpor.service.default_model import DefaultModelError
from torpor.service.serve import ServeError
from torpor.service.settings.load import SettingsError

DONE, FAILED, USAGE, REJECTED = 0, 1, 2, 3

app = typer.Typer(
    name="torpor",
    help="Sleep and wake for the GPU memory of LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


AcceptStale = Annotated[
    bool,
    typer.Option("--accept-stale-weights", help="Updated weights may come back as their source has them."),
]


@app.command()
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


@app.command()
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


@app.command()
def status(
    model: Model = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Models, their gates, and the memory of their ranks."""
    with Client(url, token=read_token(token_file), timeout_s=30) as client:
        models = [client.model(model)] if model is not None else client.models()
    Output(json).show({"models": models}, lambda body: tables.models(body["models"]))


@app.command()
def sleep(
    model: Model = None,
    tag: Tags = None,
    restore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TAG=MODE", help="none, memset, cpu, pinned or disk for a tag; may be repeated."
        ),
    ] = None,
    drain: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            help="finish, abort or freeze what runs; if_idle: only if nothing runs. Default: finish.",
        ),
    ] = None,
    drain_timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds.")] = None,
    freeze_timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds until frozen requests end. Default: never.")
    ] = None,
    overflow: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="When not all that is to be kept finds room: reject, or evict reusable prefixes. Default: reject.",
        ),
    ] = None,
    verify: Verify = None,
    timeout: Timeout = None,
    wake_on_request: Annotated[
        bool, typer.Option("--wake-on-request", help="No hold: an inference request may wake it.")
    ] = False,
    dry_run: DryRun = False,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Give the model's memory back. It is a hold: only `torpor wake` ends it."""
    wishes = {
        name: value
        for name, value in (
            ("mode", drain),
            ("timeout_s", drain_timeout),
            ("freeze_timeout_s", freeze_timeout),
        )
        if value is not None
    }
    modes = dict(tag_and_mode(pair) for pair in restore) if restore else None
    with Client(url, token=read_token(token_file)) as client:
        record = client.sleep(
            model,
            tags=tag,
            restore=modes,
            drain=wishes or None,
            overflow=overflow,
            verify=verify,
            timeout_s=timeout,
            wake_on_request=wake_on_request or None,
            dry_run=dry_run or None,
            wait=wait,
        )
    Output(json).show(record, tables.operation)


@app.command()
def wake(
    model: Model = None,
    tag: Tags = None,
    verify: Verify = None,
    timeout: Timeout = None,
    dry_run: DryRun = False,
    on_discard: Annotated[
        str | None,
        typer.Option(metavar="reload|wait", help="Of weights without contents. Default: as configured."),
    ] = None,
    accept_stale_weights: AcceptStale = False,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Take the model's memory again."""
    with Client(url, token=read_token(token_file)) as client:
        record = client.wake(
            model,
            tags=tag,
            verify=verify,
            timeout_s=timeout,
            dry_run=dry_run or None,
            on_discard=on_discard,
            accept_stale_weights=accept_stale_weights or None,
            wait=wait,
        )
    Output(json).show(record, tables.operation)


@app.command()
def recover(
    model: Annotated[str, typer.Argument(help="The model.")],
    to: Annotated[
        str | None, typer.Option(metavar="STATE", help="awake or asleep. Default: as it was.")
    ] = None,
    accept_stale_weights: AcceptStale = False,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Replace the ranks of a failed model."""
    with Client(url, token=read_token(token_file)) as client:
        record = client.recover(model, to=to, accept_stale_weights=accept_stale_weights or None, wait=wait)
    Output(json).show(record, tables.operation)


@app.command()
def delete(
    model: Annotated[str, typer.Argument(help="The model.")],
    drain: Annotated[
        str | None, typer.Option(metavar="MODE", help="finish or abort what runs. Default: finish.")
    ] = None,
    drain_timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds.")] = None,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """End a model and forget it; its memory is free afterwards."""
    wishes = {
        name: value for name, value in (("mode", drain), ("timeout_s", drain_timeout)) if value is not None
    }
    with Client(url, token=read_token(token_file)) as client:
        record = client.delete(model, drain=wishes or None, wait=wait)
    Output(json).show(record, tables.operation)


@app.command("update-weights")
def update_weights(
    model: Annotated[str, typer.Argument(help="The model.")],
    path: Annotated[
        str, typer.Argument(help="Safetensors folder or GGUF file on the ranks' nodes, under weights_roots.")
    ],
    drain: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            help="finish, abort or freeze what runs; if_idle: only if nothing runs. Default: finish.",
        ),
    ] = None,
    drain_timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds.")] = None,
    timeout: Timeout = None,
    dry_run: DryRun = False,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Write other weights into a model, in place and on all ranks, or on none."""
    wishes = {
        name: value for name, value in (("mode", drain), ("timeout_s", drain_timeout)) if value is not None
    }
    with Client(url, token=read_token(token_file)) as client:
        record = client.update_weights(
            model, path, drain=wishes or None, timeout_s=timeout, dry_run=dry_run or None, wait=wait
        )
    Output(json).show(record, tables.operation)


@app.command()
def events(
    model: Annotated[str | None, typer.Argument(help="Only of this model.")] = None,
    last_event_id: Annotated[
        str | None, typer.Option("--since", metavar="ID", help="First what has come since this event.")
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """What happens, as it happens, until interrupted."""
    with Client(url, token=read_token(token_file)) as client:
        for event in client.events(model, last_event_id):
            Output(json).line(dataclasses.asdict(event), tables.event(event.id, event.kind, event.data))


@app.command()
def ops(
    model: Model = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Operations, newest first."""
    with Client(url, token=read_token(token_file), timeout_s=30) as client:
        records = client.operations(model, limit)
    Output(json).show({"operations": records}, lambda body: tables.operations(body["operations"]))


@app.command()
def audit(
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Who has changed what, newest first; for administrators."""
    with Client(url, token=read_token(token_file), timeout_s=30) as client:
        entries = client.audit(limit)
    Output(json).show({"audit": entries}, lambda body: tables.audit(body["audit"]))


@app.command()
def doctor(json: Json = False) -> None:
    """What of this machine is in the way, and how it is mended. Exits 1 where something is a fault."""
    # Here, so that the other commands do not wait for the native core.
    from torpor.service.cli.doctor_command import run_doctor

    raise typer.Exit(run_doctor(json))


@app.command()
def version() -> None:
    """Print the version."""
    print(service_version())


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Every expected fault is one line on stderr, without a traceback."""
    try:
        app(args=list(arguments) if arguments is not None else None)
    except SystemExit as done:  # typer's own way to end, usage errors told already
        return done.code if isinstance(done.code, int) else FAILED
    except ProblemError as error:
        return _complain(str(error), _problem_exit(error))
    except (ServeError, SettingsError, DefaultModelError, ClientError) as error:
        return _complain(str(error), USAGE if isinstance(error, SettingsError) else FAILED)
    return DONE


def _problem_exit(error: ProblemError) -> int:
    if isinstance(error, BadRequest | NotFound):
        return USAGE
    return REJECTED if isinstance(error, Rejected | Unavailable | Denied) else FAILED


def _complain(text: str, code: int) -> int:
    print(f"torpor: {text}", file=sys.stderr)
    return code
