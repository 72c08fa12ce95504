"""Writes the table of values in helm/torpor/README.md anew from values.yaml; with --check only says if it is stale.

A value's text is the comment above it; values without one are told by their name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parent.parent / "helm" / "torpor"
BEGIN, END = "<!-- values: begin -->\n", "<!-- values: end -->\n"


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    """(dotted key, default as JSON, comment) of each value, sections left out unless they hold a plain map."""
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from _rows(root, yaml.safe_load(text), text.splitlines(), "")


def _rows(
    node: yaml.MappingNode, tree: dict[str, object], lines: list[str], at: str
) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        name, comment = at + key.value, _comment(lines, key.start_mark.line)
        inner = tree[key.value]
        if isinstance(value, yaml.MappingNode) and isinstance(inner, dict) and not comment and inner:
            yield from _rows(value, inner, lines, name + ".")
        else:
            yield name, json.dumps(inner), comment


def _comment(lines: list[str], line: int) -> str:
    above = lines[line - 1].strip() if line else ""
    return above.removeprefix("# ") if above.startswith("#") else ""


def table() -> str:
    body = [f"| `{key}` | `{default}` | {text} |\n" for key, default, text in rows(_values())]
    return "".join(["| value | default | what |\n", "| --- | --- | --- |\n", *body])


def _values() -> str:
    return (CHART / "values.yaml").read_text()


def main() -> int:
    readme = CHART / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + BEGIN + table() + END + after
    if sys.argv[1:] != ["--check"]:
        readme.write_text(wanted)
        return 0
    if text != wanted:
        print("helm/torpor/README.md: the table is stale; run python deploy/chart_table.py", file=sys.stderr)
    return int(text != wanted)


if __name__ == "__main__":
    sys.exit(main())
