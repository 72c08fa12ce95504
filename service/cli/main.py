"""The commands together, and what they exit with: 0 done, 1 failed, 2 usage, 3 rejected."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence

import typer

from torpor.service.bench.errors import BenchError
from torpor.service.cli.commands import hosting, lives, looking, measuring, memory
from torpor.service.cli.session import Connect
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
COMMANDS: Mapping[str, Callable[..., None]] = {
    "serve": hosting.serve,
    "apply": hosting.apply,
    "status": looking.status,
    "sleep": memory.sleep,
    "wake": memory.wake,
    "pause": lives.pause,
    "unpause": lives.unpause,
    "recover": lives.recover,
    "delete": lives.delete,
    "update-weights": memory.update_weights,
    "trim": memory.trim,
    "ops": looking.ops,
    "cancel": looking.cancel,
    "events": looking.events,
    "audit": looking.audit,
    "bench": measuring.bench,
    "doctor": measuring.doctor,
    "version": hosting.version,
}


def make_app() -> typer.Typer:
    app = typer.Typer(
        name="torpor",
        help="Sleep and wake for the GPU memory of LLM inference.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    for name, command in COMMANDS.items():
        app.command(name)(command)
    return app


def main(arguments: Sequence[str] | None = None, connect: Connect | None = None) -> int:
    """The exit code. Every expected fault is one line on stderr, without a traceback.

    With --json a refused or failed operation is on stdout, too: its problem document. connect: makes the client.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        make_app()(args=given, prog_name="torpor", obj=connect)
    except SystemExit as done:  # typer's own way to end, usage errors told already
        return done.code if isinstance(done.code, int) else FAILED
    except ProblemError as error:
        if "--json" in given:
            print(json.dumps(error.body, indent=2))
        return _complain(str(error), _problem_exit(error))
    except (ServeError, SettingsError, DefaultModelError, ClientError, BenchError) as error:
        return _complain(str(error), USAGE if isinstance(error, SettingsError) else FAILED)
    return DONE


def _problem_exit(error: ProblemError) -> int:
    if isinstance(error, BadRequest | NotFound):
        return USAGE
    return REJECTED if isinstance(error, Rejected | Unavailable | Denied) else FAILED


def _complain(text: str, code: int) -> int:
    print(f"torpor: {text}", file=sys.stderr)
    return code
