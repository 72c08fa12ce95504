"""Commands about a model's memory: sleep, wake, trim, update-weights."""

from __future__ import annotations

from typing import Annotated

import typer

from torpor.service.cli import tables
from torpor.service.cli.following import following
from torpor.service.cli.options import (
    AcceptStale,
    Conflict,
    Drain,
    DrainTimeout,
    DryRun,
    FreezeTimeout,
    Json,
    Model,
    NamedModel,
    Tags,
    Timeout,
    TokenFile,
    Url,
    Verify,
    Wait,
    drain_of,
    tag_and_mode,
)
from torpor.service.cli.output import Output
from torpor.service.cli.session import client_of
from torpor.service.client.blocking import Client
from torpor.service.client.calls import DEFAULT_URL
from torpor.service.units import parse_size_bytes


def sleep(
    context: typer.Context,
    model: Model = None,
    tag: Tags = None,
    restore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TAG=MODE", help="none, memset, cpu, pinned or disk for a tag; may be repeated."
        ),
    ] = None,
    drain: Drain = None,
    drain_timeout: DrainTimeout = None,
    freeze_timeout: FreezeTimeout = None,
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
    on_conflict: Conflict = None,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Give the model's memory back. It is a hold: only `torpor wake` ends it."""
    modes = dict(tag_and_mode(pair) for pair in restore) if restore else None
    with (
        client_of(context, url, token_file) as client,
        following(client, "sleep", model, shown=wait and not json),
    ):
        record = client.sleep(
            model,
            tags=tag,
            restore=modes,
            drain=drain_of(drain, drain_timeout, freeze_timeout),
            overflow=overflow,
            verify=verify,
            timeout_s=timeout,
            wake_on_request=wake_on_request or None,
            dry_run=dry_run or None,
            on_conflict=on_conflict,
            wait=wait,
        )
    Output(json).show(record, tables.operation)


def wake(
    context: typer.Context,
    model: Model = None,
    tag: Tags = None,
    verify: Verify = None,
    make_room: Annotated[
        str | None,
        typer.Option(metavar="none|idle", help="idle: models that nobody uses may sleep for it."),
    ] = None,
    on_discard: Annotated[
        str | None,
        typer.Option(metavar="reload|wait", help="Of weights without contents. Default: as configured."),
    ] = None,
    accept_stale_weights: AcceptStale = False,
    release: Annotated[
        str | None,
        typer.Option(
            metavar="OPERATION", help="End the hold of this sleep alone; wake when it was the last."
        ),
    ] = None,
    timeout: Timeout = None,
    dry_run: DryRun = False,
    on_conflict: Conflict = None,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Take the model's memory again."""
    with (
        client_of(context, url, token_file) as client,
        following(client, "wake", model, shown=wait and not json),
    ):
        record = client.wake(
            model,
            tags=tag,
            verify=verify,
            make_room=make_room,
            on_discard=on_discard,
            accept_stale_weights=accept_stale_weights or None,
            releases=release,
            timeout_s=timeout,
            dry_run=dry_run or None,
            on_conflict=on_conflict,
            wait=wait,
        )
    Output(json).show(record, tables.operation)


def trim(
    context: typer.Context,
    model: Model = None,
    keep: Annotated[
        str, typer.Option(metavar="SIZE", help="What each rank may go on keeping, e.g. 512MiB.")
    ] = "0",
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Give back host memory that is kept for speed alone; what sleeps loses nothing."""
    try:
        target_bytes = parse_size_bytes(keep)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--keep") from None
    with client_of(context, url, token_file) as client:
        record = client.trim(model or _only_model(client), target_bytes)
    Output(json).show(record, tables.trimmed)


def _only_model(client: Client) -> str:
    names = [str(model["name"]) for model in client.models()]
    if len(names) == 1:
        return names[0]
    raise typer.BadParameter(f"say which one: {', '.join(names) or 'there is none'}", param_hint="MODEL")


def update_weights(
    context: typer.Context,
    model: NamedModel,
    path: Annotated[
        str, typer.Argument(help="Safetensors folder or GGUF file on the ranks' nodes, under weights_roots.")
    ],
    drain: Drain = None,
    drain_timeout: DrainTimeout = None,
    timeout: Timeout = None,
    dry_run: DryRun = False,
    on_conflict: Conflict = None,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Write other weights into a model, in place and on all ranks, or on none."""
    with (
        client_of(context, url, token_file) as client,
        following(client, "update", model, shown=wait and not json),
    ):
        record = client.update_weights(
            model,
            path,
            drain=drain_of(drain, drain_timeout),
            timeout_s=timeout,
            dry_run=dry_run or None,
            on_conflict=on_conflict,
            wait=wait,
        )
    Output(json).show(record, tables.operation)
