"""Tables for people, JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType


@dataclass(frozen=True, slots=True)
class Output:
    as_json: bool

    def line(self, body: Mapping[str, Any], text: str) -> None:
        """One of many, said at once."""
        print(json.dumps(body) if self.as_json else text, flush=True)

    def show(self, body: Mapping[str, Any], render: Callable[[Any], RenderableType]) -> None:
        if self.as_json:
            print(json.dumps(body, indent=2))
        else:
            Console().print(render(body))
