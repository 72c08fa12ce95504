"""Commands about a model as a whole: pause, unpause, recover, delete."""

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
    FreezeTimeout,
    Json,
    NamedModel,
    Timeout,
    TokenFile,
    Url,
    Wait,
    drain_of,
)
from torpor.service.cli.output import Output
from torpor.service.cli.session import client_of
from torpor.service.client.calls import DEFAULT_URL


def pause(
    context: typer.Context,
    model: NamedModel,
    drain: Drain = None,
    drain_timeout: DrainTimeout = None,
    freeze_timeout: FreezeTimeout = None,
    timeout: Timeout = None,
    on_conflict: Conflict = None,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Let no request in until `torpor unpause`; no memory is touched."""
    with (
        client_of(context, url, token_file) as client,
        following(client, "pause", model, shown=wait and not json),
    ):
        record = client.pause(
            model,
            drain=drain_of(drain, drain_timeout, freeze_timeout),
            on_conflict=on_conflict,
            timeout_s=timeout,
            wait=wait,
        )
    Output(json).show(record, tables.operation)


def unpause(
    context: typer.Context,
    model: NamedModel,
    timeout: Timeout = None,
    on_conflict: Conflict = None,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Let requests in again, unless something sleeps."""
    with (
        client_of(context, url, token_file) as client,
        following(client, "unpause", model, shown=wait and not json),
    ):
        record = client.unpause(model, on_conflict=on_conflict, timeout_s=timeout, wait=wait)
    Output(json).show(record, tables.operation)


def recover(
    context: typer.Context,
    model: NamedModel,
    to: Annotated[
        str | None, typer.Option(metavar="STATE", help="awake or asleep. Default: as it was.")
    ] = None,
    accept_stale_weights: AcceptStale = False,
    on_conflict: Conflict = None,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Replace the ranks of a failed model."""
    with (
        client_of(context, url, token_file) as client,
        following(client, "recover", model, shown=wait and not json),
    ):
        record = client.recover(
            model,
            to=to,
            accept_stale_weights=accept_stale_weights or None,
            on_conflict=on_conflict,
            wait=wait,
        )
    Output(json).show(record, tables.operation)


def delete(
    context: typer.Context,
    model: NamedModel,
    drain: Annotated[
        str | None, typer.Option(metavar="MODE", help="finish or abort what runs. Default: finish.")
    ] = None,
    drain_timeout: DrainTimeout = None,
    on_conflict: Conflict = None,
    wait: Wait = True,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """End a model and forget it; its memory is free afterwards."""
    with (
        client_of(context, url, token_file) as client,
        following(client, "delete", model, shown=wait and not json),
    ):
        record = client.delete(
            model, drain=drain_of(drain, drain_timeout), on_conflict=on_conflict, wait=wait
        )
    Output(json).show(record, tables.operation)
