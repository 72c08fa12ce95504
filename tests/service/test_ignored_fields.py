"""Fields without a meaning here are named in a header, whatever they are called."""

from __future__ import annotations

from urllib.parse import quote

import httpx
import pytest


@pytest.mark.parametrize("field", ["ā", "日本", "a\r\nSet-Cookie: a=b", "", " ", "x" * 5000])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"model": "chat", "prompt": "x", "max_tokens": 1}), ("/release_memory", {})],
)
async def test_an_ignored_field_of_any_name_is_told_in_a_header_that_can_be_sent(
    http: httpx.AsyncClient, path: str, body: dict[str, object], field: str
) -> None:
    """F21."""
    answer = await http.post(path, json={**body, field: 1})
    assert answer.status_code == 200, answer.text
    assert "set-cookie" not in answer.headers
    assert answer.headers.get("torpor-ignored", "") == quote(field, safe="")[:1000]
