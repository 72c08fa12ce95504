"""Reads a JSON body strictly: what Python would pass over, or answer in words of its own, is told to the sender."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torpor.service.problems import Code, Problem

MAX_DEPTH = 64  # of objects and lists in each other
MAX_DIGITS = 20  # of an integer: those of 64 bits
_TOLD = 40  # characters of a number
# Every digit as 0, every exponent's letter as e: what numbers that cannot be used look like can then be searched for.
_SHAPES = bytes(
    ord("0" if chr(byte) in "0123456789" else "e" if chr(byte) in "eE" else chr(byte)) for byte in range(256)
)
_ODD_SHAPES = (b"0" * (MAX_DIGITS + 1), b"e000", b"e+000", b"NaN", b"Infinity")


@dataclass(frozen=True, slots=True)
class _Unusable:
    """A number, as it was written, that is none here."""

    text: str


def parse_object(raw: bytes) -> dict[str, Any]:
    """The object that `raw` is. Raises a Problem that says what is wrong with it, and where."""
    # Most bodies have none of these, and are read by C code alone.
    shapes = raw.translate(_SHAPES)
    suspicious = any(shape in shapes for shape in _ODD_SHAPES)
    numbers: dict[str, Any] = {"parse_int": _integer, "parse_float": _float, "parse_constant": _Unusable}
    try:
        tree = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_once, **(numbers if suspicious else {}))
    except UnicodeDecodeError as error:
        detail = f"The body is not valid JSON: byte {error.start} is no UTF-8."
        raise _malformed(detail, "Send it as UTF-8.") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _malformed(f"The body is not valid JSON: {error}", "Send a JSON object.") from None
    if not isinstance(tree, dict):
        raise _malformed("The body is JSON, but no object.", 'Send {"…": …}.')
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(tree)
    if suspicious:
        _check_numbers(tree)
    if b"\\u" in raw:
        _check_text(tree)
    return tree


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What says the same twice is heard once; what contradicts itself is a Problem."""
    made = dict(pairs)
    if len(made) < len(pairs):
        for name, value in pairs:
            if type(value) is not type(made[name]) or value != made[name]:
                detail = f"`{name}` is there twice, with different values."
                raise Problem(422, Code.INVALID_FIELD, detail, hint=f"Send `{name}` once.")
    return made


def _integer(text: str) -> int | _Unusable:
    return int(text) if len(text.lstrip("-")) <= MAX_DIGITS else _Unusable(text)


def _float(text: str) -> float | _Unusable:
    number = float(text)
    return number if math.isfinite(number) else _Unusable(text)


def _check_numbers(tree: dict[str, Any]) -> None:
    for where, number in _unusable(tree, ""):
        told = number.text if len(number.text) <= _TOLD else f"{number.text[:_TOLD]}…"
        detail = f"{where}: {told} is beyond all numbers that are taken."
        hint = f"Send a finite number; integers have at most {MAX_DIGITS} digits."
        raise Problem(422, Code.INVALID_FIELD, detail, hint=hint, param=where)


def _unusable(node: Any, where: str) -> Iterator[tuple[str, _Unusable]]:
    if isinstance(node, _Unusable):
        yield where, node
    elif isinstance(node, dict | list):
        parts = node.items() if isinstance(node, dict) else enumerate(node)
        for name, part in parts:
            yield from _unusable(part, f"{where}.{name}" if where else str(name))


def _check_depth(tree: dict[str, Any]) -> None:
    level: list[Any] = [tree]
    for _ in range(MAX_DEPTH):
        parts = (part for node in level for part in (node.values() if isinstance(node, dict) else node))
        level = [part for part in parts if isinstance(part, dict | list)]
        if not level:
            return
    raise _too_deep()


def _check_text(tree: dict[str, Any]) -> None:
    """JSON can spell half of a surrogate pair, which is no text: nothing could be encoded from it."""
    try:
        json.dumps(tree, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        detail = f"The body has the escape {half} without its other half: it is no Unicode text."
        hint = "Send characters beyond U+FFFF as themselves, or as both escapes."
        raise _malformed(detail, hint) from None


def _too_deep() -> Problem:
    detail = f"The body has more than {MAX_DEPTH} objects and lists within each other."
    return Problem(422, Code.INVALID_FIELD, detail, hint="Send it flatter; no call needs so many.")


def _malformed(detail: str, hint: str) -> Problem:
    return Problem(400, Code.MALFORMED_JSON, detail, hint=hint)
