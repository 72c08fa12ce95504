"""The OpenAPI document is kept, complete, and whole."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torpor.service.openapi.answers import ANSWERS

ROOT = Path(__file__).parents[2]
KEPT = json.loads((ROOT / "docs" / "openapi.json").read_text(encoding="utf-8"))


def test_the_kept_document_is_that_of_the_routes() -> None:
    make = runpy.run_path(str(ROOT / "deploy" / "openapi.py"))
    assert (ROOT / "docs" / "openapi.json").read_text(encoding="utf-8") == make["generated"](), (
        "run `make openapi`"
    )


def test_the_table_of_answers_has_every_call_and_no_other() -> None:
    calls = {f"{verb.upper()} {path}" for path, verbs in KEPT["paths"].items() for verb in verbs}
    assert calls == set(ANSWERS)


def test_the_document_is_openapi_and_its_references_lead_somewhere() -> None:
    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from ([node["$ref"]] if isinstance(node.get("$ref"), str) else [])
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    known = {f"#/components/schemas/{name}" for name in KEPT["components"]["schemas"]}
    assert set(references(KEPT)) <= known
    assert known - set(references(KEPT)) == set(), "nothing names these"
