"""Prints what torpor needs at run time, from pyproject.toml: one requirement a line.

    python deploy/requirements.py [EXTRA]     with those of an extra, where there is one of that name

Set-up installs these under the constraints before torpor itself, and so does a container's first layer: a change of
our code then reuses everything below it.
"""

from __future__ import annotations

import pathlib
import sys
import tomllib

PROJECT = pathlib.Path(__file__).resolve().parent.parent / "pyproject.toml"


def main() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project.get("optional-dependencies", {})
    wanted = [name for extra in sys.argv[1:] for name in extras.get(extra, [])]
    print("\n".join([*project["dependencies"], *wanted]))


if __name__ == "__main__":
    main()
