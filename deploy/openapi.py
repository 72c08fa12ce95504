"""Writes docs/openapi.json from the routes: `make openapi`. With --check it only says whether the file is stale."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import structlog

from torpor.actors.config import ClusterConfig
from torpor.service.app import create_app
from torpor.service.gate.gates import Gates
from torpor.service.openapi.document import text

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "openapi.json"


def generated() -> str:
    """The text that docs/openapi.json should have; no cluster is asked for it."""
    nobody = cast(Any, SimpleNamespace(on_abort=lambda end: None))
    gates = Gates(ClusterConfig(models=()))
    return text(create_app(nobody, nobody, logger=structlog.get_logger(), gates=gates))


def main() -> int:
    if "--check" not in sys.argv[1:]:
        DOCUMENT.write_text(generated(), encoding="utf-8")
        return 0
    if DOCUMENT.exists() and DOCUMENT.read_text(encoding="utf-8") == generated():
        return 0
    print("docs/openapi.json is stale; run `make openapi`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
