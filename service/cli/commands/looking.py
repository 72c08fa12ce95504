"""Commands that look: status, ops, events, audit; and cancel, for what they show."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from torpor.service.cli import tables
from torpor.service.cli.options import Json, Limit, ModelWanted, TokenFile, Url, complete_model
from torpor.service.cli.output import Output
from torpor.service.cli.session import LOOK_S, client_of
from torpor.service.client.calls import DEFAULT_URL


def status(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Only this model.", autocompletion=complete_model)
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Models, their gates, and the memory of their ranks."""
    with client_of(context, url, token_file, LOOK_S) as client:
        models = [client.model(model)] if model is not None else client.models()
    Output(json).show({"models": models}, lambda body: tables.models(body["models"]))


def ops(
    context: typer.Context,
    model: ModelWanted = None,
    limit: Limit = 20,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Operations, newest first."""
    with client_of(context, url, token_file, LOOK_S) as client:
        records = client.operations(model, limit)
    Output(json).show({"operations": records}, lambda body: tables.operations(body["operations"]))


def cancel(
    context: typer.Context,
    operation: Annotated[str, typer.Argument(help="Its id, as of `torpor ops`.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Cancel an operation that is not decided yet; everything is then as before."""
    with client_of(context, url, token_file) as client:
        record = client.cancel(operation)
    Output(json).show(record, tables.operation)


def events(
    context: typer.Context,
    model: ModelWanted = None,
    last_event_id: Annotated[
        str | None, typer.Option("--since", metavar="ID", help="First what has come since this event.")
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="End after so many. Default: when interrupted.")
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """What happens, as it happens, until interrupted."""
    with client_of(context, url, token_file) as client:
        for at, event in enumerate(client.events(model, last_event_id), start=1):
            Output(json).line(dataclasses.asdict(event), tables.event(event.id, event.kind, event.data))
            if at == count:
                return


def audit(
    context: typer.Context,
    limit: Limit = 20,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Who has changed what, newest first; for administrators."""
    with client_of(context, url, token_file, LOOK_S) as client:
        entries = client.audit(limit)
    Output(json).show({"audit": entries}, lambda body: tables.audit(body["audit"]))
