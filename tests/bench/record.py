"""A kept result: one JSON file a run, the same shape for every benchmark (see docs/performance.md)."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
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
        lines = [f"{'subject':<12}{'case':<28}{'metric':<12}{'median':>12}{'min':>12}{'max':>12}"]
        lines += [
            f"{row['subject']:<12}{row['case']:<28}{row['metric']:<12}"
            f"{row['median']:>12.4f}{row['min']:>12.4f}{row['max']:>12.4f}"
            for row in self.rows()
        ]
        return "\n".join(lines)
