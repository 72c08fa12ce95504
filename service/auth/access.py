"""Which role each call wants: one table. A call that is not in it is refused, whoever asks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torpor.service.auth.roles import Role

OPEN: frozenset[Role] = frozenset()  # nobody is asked who he is; such answers say little
_LOOK = frozenset({Role.VIEWER})
_LOOK_OR_ASK = frozenset({Role.VIEWER, Role.INFERENCE})
_ASK = frozenset({Role.INFERENCE})
_OPERATE = frozenset({Role.OPERATOR})
_ADMINISTER = frozenset({Role.ADMIN})

# Any one of the roles will do. GET stands for HEAD, too.
CALLS: Mapping[frozenset[Role], tuple[str, ...]] = {
    OPEN: ("GET /livez", "GET /readyz", "GET /health"),
    _LOOK: (
        *("GET /metrics", "GET /docs", "GET /openapi.json"),
        *("GET /models", "GET /models/{model}", "GET /operations", "GET /operations/{operation_id}"),
        *("GET /events", "GET /memory_status", "GET /is_sleeping", "GET /is_paused"),
    ),
    _LOOK_OR_ASK: ("GET /v1/models", "GET /v1/models/{name}", "GET /health_generate"),
    _ASK: ("POST /v1/completions", "POST /v1/chat/completions", "POST /abort_request"),
    _OPERATE: (
        *("POST /sleep", "POST /models/{model}/sleep", "POST /wake", "POST /models/{model}/wake"),
        *("POST /wake_up", "POST /wakeup", "POST /release_memory", "POST /resume_memory"),
        *("POST /release_memory_occupation", "POST /resume_memory_occupation"),
        *("POST /models/{model}/pause", "POST /models/{model}/unpause", "POST /models/{model}/trim"),
        *("POST /pause", "POST /resume", "POST /pause_generation", "POST /continue_generation"),
        *("POST /reset_prefix_cache", "GET /flush_cache", "POST /flush_cache"),
        *("POST /operations/{operation_id}/cancel", "POST /operations/{operation_id}/renew"),
    ),
    _ADMINISTER: (
        *("DELETE /models/{model}", "POST /models/{model}/recover"),
        *("GET /audit", "POST /models/{model}/update_weights", "POST /update_weights_from_disk"),
    ),
}


@dataclass(frozen=True, slots=True)
class Call:
    """A line of the table. path: as routes spell it; a mount for one model is taken off before."""

    method: str
    path: str
    roles: frozenset[Role]

    @property
    def is_open(self) -> bool:
        return not self.roles

    @property
    def changes(self) -> bool:
        """It changes something other than a request's own answer."""
        return (
            not self.is_open
            and not self.is_inference
            and (self.method != "GET" or self.path == "/flush_cache")
        )

    @property
    def is_inference(self) -> bool:
        return self.path.startswith("/v1/")


class AccessTable:
    """Finds a request's line by method and path alone, before any route sees it."""

    def __init__(self, calls: Mapping[frozenset[Role], tuple[str, ...]] = CALLS) -> None:
        self._exact: dict[tuple[str, str], Call] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Call]] = []
        for roles, lines in calls.items():
            for line in lines:
                method, _, path = line.partition(" ")
                call = Call(method, path, roles)
                if "{" in path:
                    pattern = re.compile(re.sub(r"\{\w+\}", "[^/]+", path))
                    self._patterns.append((method, pattern, call))
                else:
                    self._exact[method, path] = call

    def __iter__(self) -> Iterator[Call]:
        yield from self._exact.values()
        yield from (call for _, _, call in self._patterns)

    def find(self, method: str, path: str) -> Call | None:
        """None: there is no such line, and nobody may."""
        method = "GET" if method == "HEAD" else method
        exact = self._exact.get((method, path))
        if exact is not None:
            return exact
        return next((call for m, p, call in self._patterns if m == method and p.fullmatch(path)), None)

    def methods(self, path: str) -> list[str]:
        return sorted({call.method for call in self if self.find(call.method, path) is not None})
