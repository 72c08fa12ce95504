"""Sizes and durations as people write them, read and printed; errors as one line."""

from __future__ import annotations

import re

_SIZE_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_DURATION_FACTORS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
MAX_SIZE_BYTES = (1 << 63) - 1  # what the native core counts with
MAX_DURATION_S = 1e9  # 30 years; what waits for it counts nanoseconds in 64 bits
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size_bytes(value: object) -> int:
    """Bytes from 1048576, "512MiB" or "1.5 GB". Raises ValueError with what to write instead."""
    form = 'a size is a whole number of bytes, or like "512MiB" or "1GB"'
    size = _scaled(value, _SIZE_FACTORS, form)
    if size > MAX_SIZE_BYTES:
        raise ValueError(f"{value!r} is out of range: {form}, and less than 8 EiB")
    if size != int(size):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


def parse_duration_s(value: object) -> float:
    """Seconds from 30, 0.5, "500ms", "30s", "2m" or "1h". Raises ValueError with what to write instead."""
    form = 'a duration is a number of seconds, or like "500ms" or "2m"'
    duration_s = _scaled(value, _DURATION_FACTORS, form)
    if duration_s > MAX_DURATION_S:
        raise ValueError(f"{value!r} is out of range: {form}, and at most {MAX_DURATION_S:.0e} seconds")
    return float(duration_s)


def _scaled(value: object, factors: dict[str, int] | dict[str, float], form: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(form)
    if not isinstance(value, str):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{value!r} is out of range: {form}")
        return value
    match = _NUMBER_AND_UNIT.fullmatch(value)
    if match is None or match[2].lower() not in factors:
        raise ValueError(f"{value!r} is not understood: {form}")
    number = int(match[1]) if match[1].isdigit() else float(match[1])
    return number * factors[match[2].lower()]


def show_bytes(size_bytes: int) -> str:
    """1.5 GiB, 512.0 MiB, 12 B."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def sentences(detail: str, hint: str) -> str:
    """What is wrong and what helps, for one line; a detail without its full stop gets one before the hint."""
    detail, hint = detail.strip(), hint.strip()
    stop = "." if detail and hint and detail[-1] not in ".!?:;…" else ""
    return f"{detail}{stop} {hint}".strip()
