"""Options that several commands share, and what is read out of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    # Here, for what asks the service needs these options.
    from torpor.service.cli.session import model_names

    return model_names(context, incomplete)


Url = Annotated[str, typer.Option("--url", envvar="TORPOR_URL", help="Where the service listens.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="TORPOR_TOKEN_FILE",
        help="A file with the access token alone. Default: the variable TORPOR_TOKEN.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", help="Only this tag; may be repeated. Default: all.")
]
Model = Annotated[
    str | None,
    typer.Argument(help="The model; may be left out when there is one.", autocompletion=complete_model),
]
ModelWanted = Annotated[str | None, typer.Argument(help="Only of this model.", autocompletion=complete_model)]
NamedModel = Annotated[str, typer.Argument(help="The model.", autocompletion=complete_model)]
Limit = Annotated[int, typer.Option(min=1, max=1000)]
Conflict = Annotated[
    str | None,
    typer.Option(
        "--on-conflict",
        metavar="reject|wait",
        help="When another operation on the model is under way. Default: reject.",
    ),
]
Drain = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        help="finish, abort or freeze what runs; if_idle: only if nothing runs. Default: finish.",
    ),
]
DrainTimeout = Annotated[float | None, typer.Option(min=0.001, help="Seconds.")]
FreezeTimeout = Annotated[
    float | None, typer.Option(min=0.001, help="Seconds until frozen requests end. Default: never.")
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", min=0.001, help="Seconds for preflight to stage.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")]
Verify = Annotated[
    bool | None,
    typer.Option("--verify/--no-verify", help="Check by checksums what is kept. Default: as configured."),
]
AcceptStale = Annotated[
    bool,
    typer.Option("--accept-stale-weights", help="Updated weights may come back as their source has them."),
]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the end, or only begin.")]


def read_token(file: Path | None) -> str | None:
    """Of a file, for the arguments of a process are seen by everybody on its machine."""
    if file is None:
        return None
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(
            f"{file} cannot be read: {getattr(error, 'strerror', None) or 'it is no plain text'}",
            param_hint="--token-file",
        ) from None


def tag_and_mode(pair: str) -> tuple[str, str]:
    tag, equals, mode = pair.partition("=")
    if not (tag and equals and mode):
        raise typer.BadParameter(f"{pair!r} is not TAG=MODE, such as kv_cache=pinned", param_hint="--restore")
    return tag, mode


def drain_of(
    mode: str | None, timeout_s: float | None, freeze_timeout_s: float | None = None
) -> dict[str, Any] | None:
    """The body's `drain`; None where nothing of it was said."""
    said = {"mode": mode, "timeout_s": timeout_s, "freeze_timeout_s": freeze_timeout_s}
    return {name: value for name, value in said.items() if value is not None} or None
