"""`torpor doctor`: what of this machine is in the way."""

from __future__ import annotations

import os

from rich.console import RenderableType

from torpor.service.cli import tables
from torpor.service.cli.output import Output
from torpor.service.doctor.checks import examine
from torpor.service.doctor.findings import findings_json
from torpor.service.doctor.probe import probe

HEALTHY, FAULTY = 0, 1


def run_doctor(as_json: bool) -> int:
    """The exit code: 1 where something is a fault; warnings leave it 0."""
    report = findings_json(examine(probe(os.environ)))
    Output(as_json).show(report, _table)
    return HEALTHY if report["healthy"] else FAULTY


def _table(report: tables.Record) -> RenderableType:
    return tables.doctor(report["findings"])
