"""A kept result of a table of tests: one row for each case, replaced when that case has run again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from bench.record import command, machine

RESULTS = Path(__file__).parents[1] / "bench" / "results"


def keep_row(table: str, keys: tuple[str, ...], row: dict[str, Any], notes: str = "") -> Path:
    """Write `row` into the table of this name, in the place of the one that is equal in `keys`.

    Each row says which commit, day and machine it is of: a table may be filled over several runs.
    """
    path = Path(os.environ.get("TORPOR_RESULTS", RESULTS)) / f"{table}.json"
    record = json.loads(path.read_text()) if path.exists() else {"id": table, "rows": []}
    # A copy without its history, or with another's, says by TORPOR_COMMIT which commit it is of.
    commit = os.environ.get("TORPOR_COMMIT") or command("git", "rev-parse", "--short", "HEAD")
    row = row | {"commit": commit, "date": time.strftime("%Y-%m-%d"), "machine": machine()}
    others = [one for one in record["rows"] if any(one.get(key) != row[key] for key in keys)]
    record["rows"] = sorted([*others, row], key=lambda one: [str(one.get(key, "")) for key in keys])
    record["notes"] = notes or record.get("notes", "")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
