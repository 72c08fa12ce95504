"""What a check says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torpor.service.doctor.facts import Facts


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """found: how it is, in a few words. mend: what to do about it; empty where all is well."""

    check: str
    level: Level
    found: str
    mend: str = ""


Check = Callable[[Facts], Finding]


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warning(check: str, found: str, mend: str) -> Finding:
    return Finding(check, Level.WARNING, found, mend)


def fault(check: str, found: str, mend: str) -> Finding:
    return Finding(check, Level.FAULT, found, mend)


def findings_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """{healthy: nothing is a fault, findings: [{check, level, found, mend}]}."""
    return {
        "healthy": all(finding.level is not Level.FAULT for finding in findings),
        "findings": [
            {
                "check": finding.check,
                "level": finding.level.value,
                "found": finding.found,
                "mend": finding.mend,
            }
            for finding in findings
        ],
    }
