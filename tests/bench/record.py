"""A kept result: one JSON file a run, the same shape for every benchmark (see docs/performance.md)."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def command(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> dict[str, Any]:
    gpu = command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    name, _, driver = gpu[0].partition(", ") if gpu else ("", "", "")
    return {
        "gpu": name or None,
        "driver": driver or None,
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
    }


@dataclass
class Result:
    """Collects samples by (subject, case, metric); `save` writes medians and all samples."""

    id: str
    notes: str = ""
    samples: dict[tuple[str, str, str, str], list[float]] = field(default_factory=dict)

    def add(self, subject: str, case: str, metric: str, unit: str, value: float) -> None:
        self.samples.setdefault((subject, case, metric, unit), []).append(value)

    def median(self, subject: str, case: str, metric: str) -> float:
        """Of what was added under these names, whatever the unit."""
        found = [values for key, values in self.samples.items() if key[:3] == (subject, case, metric)]
        return statistics.median(found[0])

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "subject": subject,
                "case": case,
                "metric": metric,
                "unit": unit,
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
                "samples": values,
            }
            for (subject, case, metric, unit), values in self.samples.items()
        ]

    def save(self, folder: Path, machine_name: str) -> Path:
        path = folder / f"{self.id}-{machine_name}.json"
        record = {
            "id": self.id,
            "date": time.strftime("%Y-%m-%d"),
            # A copy without its history says by TORPOR_COMMIT which commit it is of.
            "commit": os.environ.get("TORPOR_COMMIT") or command("git", "rev-parse", "--short", "HEAD"),
            "machine": machine(),
            "rows": self.rows(),
            "notes": self.notes,
        }
        path.write_text(json.dumps(record, indent=1) + "\n")
        return path

    def table(self) -> str:
        return table(self.rows())


def table(rows: Iterable[dict[str, Any]]) -> str:
    """For people: one line a subject and case, of each metric median (least to most)."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        figures = f"{row['metric']} {row['median']:.4f} ({row['min']:.4f} to {row['max']:.4f})"
        samples = len(row["samples"])
        lines.setdefault((row["subject"], row["case"]), [f"n={samples:<2}"]).append(figures)
    widths = [max((len(key[part]) for key in lines), default=0) for part in (0, 1)]
    return "\n".join(
        f"{subject:<{widths[0]}}  {case:<{widths[1]}}  {'  '.join(figures)}"
        for (subject, case), figures in lines.items()
    )


def main() -> None:
    """Prints kept results: python tests/bench/record.py FILE…"""
    for name in sys.argv[1:]:
        record = json.loads(Path(name).read_text())
        print(f"{record['id']}: {record.get('notes', '')}")
        print(table(record["rows"]) if "machine" in record else "\n".join(map(json.dumps, record["rows"])))


if __name__ == "__main__":
    main()
