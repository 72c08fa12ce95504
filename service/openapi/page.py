"""The document as one page of HTML that needs nothing else: front doors often have no way out to the web."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Node = Mapping[str, Any]
# No script, no frame, nothing loaded from anywhere; the style is the page's own.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_GROUPS = {
    "native": "Torpor's own calls",
    "openai": "OpenAI's calls",
    "drop-in": "Calls of other engines' clients",
    "health": "Probes and metrics",
}
_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,.call{font-family:ui-monospace,monospace;font-size:.92em}
details{border-top:1px solid #8884;padding:.4rem 0}summary{cursor:pointer}
summary .what{opacity:.75}.call{font-weight:600;margin-right:.6rem}
table{border-collapse:collapse;width:100%;margin:.3rem 0 .8rem;font-size:.94em}
th,td{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;border-bottom:1px solid #8882}
th{font-weight:600}h3{font-size:1rem;margin:.8rem 0 .2rem}nav a{margin-right:1rem}
"""


def page(document: Node) -> str:
    """Every call with its parameters, its body's fields and its answers, by group; then the shapes of answers."""
    info, groups = document["info"], _grouped(document)
    links = "".join(f'<a href="#{_anchor(name)}">{_text(name)}</a>' for name in (*groups, "Shapes"))
    calls = "".join(
        f'<h2 id="{_anchor(name)}">{_text(name)}</h2>{"".join(_call(*call) for call in calls)}'
        for name, calls in groups.items()
    )
    shapes = "".join(_shape(name, each) for name, each in document["components"]["schemas"].items())
    title = f"{_text(info['title'])} {_text(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f'<h1>{title}</h1><p>{_text(info["description"])} For programs: <a href="openapi.json">openapi.json</a>. '
        "Every call is there once more under <code>/m/MODEL/…</code>, to be a client's base URL for one model.</p>"
        f'<nav>{links}</nav>{calls}<h2 id="shapes">Shapes</h2>{shapes}</body></html>\n'
    )


def _grouped(document: Node) -> dict[str, list[tuple[str, str, Node]]]:
    groups: dict[str, list[tuple[str, str, Node]]] = {name: [] for name in _GROUPS.values()}
    for path, verbs in document["paths"].items():
        for verb, call in verbs.items():
            tag = call.get("tags", ["native"])[0]
            groups.setdefault(_GROUPS.get(tag, tag), []).append((verb.upper(), path, call))
    return {name: calls for name, calls in groups.items() if calls}


def _call(verb: str, path: str, call: Node) -> str:
    said = call.get("description", "")
    first, _, rest = said.partition("\n\n")
    parts = [f"<p>{_text(part)}</p>" for part in rest.split("\n\n") if part]
    parts.append(_table("Parameters", ("name", "in", "type", "what"), _parameters(call)))
    body = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    parts.append(_table("Body, JSON", ("field", "type", "default", "what"), _fields(body or {}, "")))
    parts.append(_table("Answers", ("status", "what", "shape"), _answers(call)))
    name = f'<span class="call">{_text(verb)} {_text(path)}</span>'
    return (
        f'<details id="{_anchor(f"{verb} {path}")}"><summary>{name}<span class="what">{_text(first)}</span></summary>'
        f"{''.join(parts)}</details>"
    )


def _parameters(call: Node) -> Iterator[Sequence[str]]:
    for one in call.get("parameters", []):
        what = one.get("description", "") + (" Required." if one.get("required") else "")
        yield (f"<code>{_text(one['name'])}</code>", _text(one["in"]), _type(one["schema"]), _text(what))


def _fields(schema: Node, before: str) -> Iterator[Sequence[str]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        default = _text(str(field["default"])) if field.get("default") not in (None, {}) else ""
        if name in required:
            default = "required"
        what = _text(field.get("description", "") if "properties" not in field else "")
        yield (f"<code>{_text(before + name)}</code>", _type(field), default, what)
        inner = [field, *field.get("anyOf", [])]
        for one in inner:
            yield from _fields(one, f"{before}{name}.")


def _answers(call: Node) -> Iterator[Sequence[str]]:
    for status, answer in call["responses"].items():
        content = answer.get("content", {})
        shapes = [_type(one["schema"]) if "schema" in one else _text(kind) for kind, one in content.items()]
        yield (_text(status), _text(answer["description"]), " or ".join(dict.fromkeys(shapes)))


def _shape(name: str, schema: Node) -> str:
    rows = list(_fields(schema, ""))
    said = f"<p>{_text(schema['description'])}</p>" if schema.get("description") else ""
    table = _table("", ("field", "type", "default", "what"), rows) if rows else f"<p>{_type(schema)}</p>"
    head = f'<summary><span class="call">{_text(name)}</span></summary>'
    return f'<details id="{_anchor(f"shape {name}")}">{head}{said}{table}</details>'


def _type(schema: Node) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f'<a href="#{_anchor(f"shape {name}")}">{_text(name)}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(
            f"<code>{_text(str(one))}</code>" for one in schema.get("enum", [schema.get("const")])
        )
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return _text(" or ".join(kind))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    values = schema.get("additionalProperties")
    if kind == "object" and isinstance(values, Mapping) and "properties" not in schema:
        return f"object of {_type(values)}"
    return _text(kind)


def _table(title: str, heads: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    if not lines:
        return ""
    head = "".join(f"<th>{name}</th>" for name in heads)
    caption = f"<h3>{title}</h3>" if title else ""
    return f"{caption}<table><tr>{head}</tr>{lines}</table>"


def _text(words: str) -> str:
    """With what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(words))


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")
