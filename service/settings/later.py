"""Keys that the configuration will know, but this version does not act on: refused by name, never ignored."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


class _Never:
    """Equal to nothing: the key is refused with any value."""


NEVER = _Never()


@dataclass(frozen=True, slots=True)
class LaterKey:
    """path: dotted, `*` = every element. neutral: the value that asks for nothing and is let through."""

    path: str
    neutral: object = NEVER


LATER_KEYS = (
    LaterKey("models.*.prefill_backup", False),
    LaterKey("host_pool.prefill", False),
)


def take_out_later(tree: dict[str, Any]) -> list[str]:
    """Removes neutral later keys from `tree` in place; returns one line for each that asks for something."""
    problems: list[str] = []
    for key in LATER_KEYS:
        for where, parent, name in _find(tree, key.path):
            value = parent[name]
            if key.neutral is not NEVER and type(value) is type(key.neutral) and value == key.neutral:
                del parent[name]
                continue
            mend = "remove it" if key.neutral is NEVER else f"remove it, or set it to {_yaml(key.neutral)}"
            problems.append(f"{where}: not available yet in this version; {mend}")
            del parent[name]
    return problems


def _yaml(value: object) -> str:
    return json.dumps(value)  # JSON is YAML


def _find(tree: Any, path: str, at: str = "") -> list[tuple[str, dict[str, Any], str]]:
    """(dotted place, parent mapping, last name) of each value under `path`."""
    head, _, rest = path.partition(".")
    if isinstance(tree, list) and head == "*":
        found = []
        for index, item in enumerate(tree):
            found += _find(item, rest, f"{at}{index}.")
        return found
    if not isinstance(tree, dict):
        return []
    names = list(tree) if head == "*" else [head] if head in tree else []
    if not rest:
        return [(f"{at}{name}", tree, name) for name in names]
    return [entry for name in names for entry in _find(tree[name], rest, f"{at}{name}.")]
