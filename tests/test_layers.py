"""Imports point downwards only: service → actors → native; and Ray is known to the edge files alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "native": {"native"},
    "actors": {"native", "actors"},
    "service": {"native", "actors", "service"},
}
# The only files that may know Ray.
RAY_EDGE = {
    "actors/cluster.py",
    "actors/coordinator/actor.py",
    "actors/rank/actor.py",
}


def sources(part: str) -> list[Path]:
    return sorted((ROOT / part).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full dotted names of all modules that the file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_layer_imports_only_itself_and_the_layers_below(part: str) -> None:
    files = sources(part)
    assert files, f"no sources in {part}/"
    for path in files:
        for name in imported(path):
            if name.startswith("torpor."):
                layer = name.split(".")[1]
                assert layer in MAY_IMPORT[part], f"{path.relative_to(ROOT)} imports {name}"


def test_only_the_edge_files_know_ray() -> None:
    for part in MAY_IMPORT:
        for path in sources(part):
            relative = path.relative_to(ROOT).as_posix()
            if relative in RAY_EDGE or relative.startswith("actors/ray/"):
                continue
            for name in imported(path):
                assert name != "ray" and not name.startswith("ray."), f"{relative} imports {name}"


def test_files_stay_short_enough_to_read() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): count
        for folder in ("service", "actors", "native", "tests", "deploy")
        for suffix in ("*.py", "*.cpp", "*.hpp", "*.cu")
        for path in (ROOT / folder).rglob(suffix)
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert not long, f"split these files: {long}"
