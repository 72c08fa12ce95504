"""Events of the service as the clients read them: server-sent events, line by line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torpor.service.client.calls import Call

QUIET_S = 60.0  # the service says something every 15 s


@dataclass(frozen=True, slots=True)
class Event:
    """kind: model, operation, deleted, reset or ending. id: to go on from, with `last_event_id`."""

    id: str
    kind: str
    data: Mapping[str, Any]


@dataclass(slots=True)
class EventReader:
    """Fed line by line, it gives an event whenever one is whole."""

    last_id: str = ""
    _kind: str = ""
    _data: list[str] = field(default_factory=list)

    def feed(self, line: str) -> Event | None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            self.last_id = value
        elif name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        elif not line and self._data:
            event = Event(self.last_id, self._kind, json.loads("\n".join(self._data)))
            self._kind, self._data = "", []
            return event
        return None


def events_call(model: str | None, last_event_id: str | None) -> Call:
    headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
    return Call("GET", "/events", None, headers, {"model": model} if model is not None else {})
