"""What differs between a model as it is and as it is wanted, and what of it may change while the model lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torpor.actors.config import ModelConfig

# Policies: coordinator and front ends act on them, and no rank was made by them. All else is the model's shape.
IN_PLACE = frozenset({"gate", "on_discard", "prefill_backup", "recover", "sleep_after_idle_s"})


@dataclass(frozen=True, slots=True)
class Difference:
    """key: dotted, as in the configuration file, where the file has it so."""

    key: str
    old: object
    new: object

    @property
    def in_place(self) -> bool:
        return self.key.partition(".")[0] in IN_PLACE


def differences(old: ModelConfig, new: ModelConfig) -> list[Difference]:
    """By key, in the order of the configuration."""
    return changed(asdict(old), asdict(new))


def shape_differences(old: ModelConfig, new: ModelConfig) -> list[Difference]:
    """Those that need new ranks."""
    return [difference for difference in differences(old, new) if not difference.in_place]


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Of two trees of plain data; a key that one of them lacks counts as None there."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    keys = [*before, *(key for key in after if key not in before)]
    return [
        Difference(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    ]


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
