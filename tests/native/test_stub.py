"""The stub that type checkers and people read is what the extension says of itself."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

from torpor.native import _core

ROOT = Path(__file__).resolve().parents[2]


def test_the_stub_in_the_repository_is_that_of_the_built_extension() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "deploy" / "stub.py", "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, (
        f"native/_core.pyi is stale; `make stub` writes it anew:\n{run.stdout}{run.stderr}"
    )


def test_every_class_and_method_says_what_it_does() -> None:
    classes = [one for _, one in inspect.getmembers(_core, inspect.isclass)]
    silent = [one.__name__ for one in classes if not one.__doc__]
    for one in classes:
        methods = [
            (name, held) for name, held in vars(one).items() if callable(held) and not name.startswith("_")
        ]
        # The first line of what nanobind keeps is the signature.
        silent += [f"{one.__name__}.{name}" for name, held in methods if "\n" not in (held.__doc__ or "")]
    assert len(classes) > 10 and not silent
