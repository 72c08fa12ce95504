"""Prints what torpor needs at run time, from pyproject.toml: one requirement a line.

Set-up installs these under the constraints before torpor itself, and so does a container's first layer: a change of
our code then reuses everything below it.
"""

from __future__ import annotations

import pathlib
import tomllib

PROJECT = pathlib.Path(__file__).resolve().parent.parent / "pyproject.toml"


def main() -> None:
    print("\n".join(tomllib.loads(PROJECT.read_text())["project"]["dependencies"]))


if __name__ == "__main__":
    main()
