"""What a command needs of the outside: a client of the service, by default one over HTTP."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import typer

from torpor.service.cli.options import read_token
from torpor.service.client.blocking import Client
from torpor.service.client.calls import DEFAULT_TIMEOUT_S, DEFAULT_URL
from torpor.service.client.errors import ClientError

Connect = Callable[..., Client]  # url, token=, timeout_s=
LOOK_S = 30.0  # for the answer of a command that only looks
COMPLETE_S = 1.0  # nobody waits longer for the completion of a word


def client_of(
    context: typer.Context, url: str, token_file: Path | None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Client:
    connect: Connect = context.obj or Client
    return connect(url, token=read_token(token_file), timeout_s=timeout_s)


def model_names(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell's completion; nothing where nobody answers."""
    connect: Connect = context.find_root().obj or Client
    url = context.params.get("url") or os.environ.get("TORPOR_URL") or DEFAULT_URL
    try:
        with connect(url, token=None, timeout_s=COMPLETE_S) as client:
            names = [str(model["name"]) for model in client.models()]
    except ClientError:
        return []
    return [name for name in names if name.startswith(incomplete)]
