"""What a sleep is asked for, as the command line and the blocking client send it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from torpor.service.cli import main
from torpor.service.client import Client

RECORD = {
    "id": "op-1",
    "kind": "sleep",
    "model": "chat",
    "state": "succeeded",
    "dry_run": False,
    "prefix_tokens_lost": 12,
    "ranks": [],
    "phases": [],
}


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is sent; every request is answered with RECORD."""
    sent: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, json=RECORD)

    whole = Client.__init__

    def init(self: Client, url: str = "http://torpor.test", **options: Any) -> None:
        whole(self, url, **{**options, "transport": httpx.MockTransport(answer)})

    monkeypatch.setattr(Client, "__init__", init)
    return sent


def test_overflow_and_verify_reach_the_service_only_where_they_are_said(
    bodies: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """K9, K13, and the lost tokens are shown."""
    assert main(["sleep", "chat", "--overflow", "evict", "--verify", "--restore", "kv_cache=disk"]) == 0
    assert bodies[-1] == {"restore": {"kv_cache": "disk"}, "overflow": "evict", "verify": True}
    assert "prefix tokens lost: 12" in capsys.readouterr().out
    assert main(["sleep", "chat", "--no-verify"]) == 0
    assert bodies[-1] == {"verify": False}
    assert main(["wake", "chat", "--verify"]) == 0
    assert bodies[-1] == {"verify": True}
    Client().sleep("chat", overflow="evict")
    assert bodies[-1] == {"overflow": "evict"}
