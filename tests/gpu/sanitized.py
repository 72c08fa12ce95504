"""Keeps what compute-sanitizer has found: python tests/gpu/sanitized.py TOOL LOG. Fails where it says nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.kept_rows import keep_row

_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


def findings(log: str) -> int | None:
    """How many, of all summaries in the log; None if there is none, since the tool could not work."""
    counts = [int(count) for count in _SUMMARY.findall(log)]
    return sum(counts) if counts else None


def main() -> None:
    tool, path = sys.argv[1:]
    count = findings(Path(path).read_text(errors="replace"))
    if count is None:
        sys.exit(f"{tool}: no summary in {path}: it did not get to work on this machine")
    keep_row("sanitizer", ("tool",), {"tool": tool, "program": "test_device_contract", "findings": count})
    print(f"{tool}: {count} findings")
    sys.exit(min(count, 1))


if __name__ == "__main__":
    main()
