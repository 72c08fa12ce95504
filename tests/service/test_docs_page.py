"""GET /docs shows every call, and loads nothing from anywhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from service_rig import Rig

from torpor.service.openapi.page import page

KEPT = json.loads((Path(__file__).parents[2] / "docs" / "openapi.json").read_text(encoding="utf-8"))
VOID = {"meta"}


class Reader(HTMLParser):
    """Whether every element is closed where it ought to be; what is linked to, and to what one can link."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {tag, *(name for name, _ in attrs)}
        given = dict(attrs)
        self.links += [str(given["href"])] if "href" in given else []
        self.ids += [str(given["id"])] if "id" in given else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.parametrize("path", ["/docs", "/m/chat/docs"])
async def test_the_page_names_no_foreign_host_and_runs_no_script(rig: Rig, path: str) -> None:
    answer = await rig.http.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"//|\burl\(|@import", answer.text.replace("<!doctype", ""))
    reader = read(answer.text)
    assert not reader.names & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "src"}
    assert {link for link in reader.links if not link.startswith("#")} == {"openapi.json"}
    beside = path.removesuffix("docs") + "openapi.json"
    assert (await rig.http.get(beside)).json()["openapi"]
    assert (await rig.http.get("/redoc")).status_code == 404


def test_the_page_has_every_call_field_and_shape_and_its_links_lead_somewhere() -> None:
    reader = read(page(KEPT))
    assert len(reader.ids) == len(set(reader.ids))
    assert {link[1:] for link in reader.links if link.startswith("#")} <= set(reader.ids)
    words = set(reader.words)
    for path, verbs in KEPT["paths"].items():
        assert {f"{verb.upper()} {path}" for verb in verbs} <= words
    assert set(KEPT["components"]["schemas"]) <= words
    assert {"drain.freeze_timeout_s", "Idempotency-Key", "pinned", "abort_all", "507"} <= words


def test_what_a_document_says_is_text_and_never_markup() -> None:
    evil = "<script>alert(1)</script>"
    call = {
        "tags": ["native"],
        "description": f"{evil} `{evil}`",
        "parameters": [{"name": evil, "in": "query", "schema": {"enum": [evil]}}],
        "responses": {"200": {"description": evil}},
    }
    shapes = {evil: {"type": "object", "properties": {evil: {"type": "string", "default": evil}}}}
    info = {"title": evil, "version": evil, "description": evil}
    made = page({"info": info, "paths": {f"/{evil}": {"get": call}}, "components": {"schemas": shapes}})
    assert "<script" not in made
    read(made)
