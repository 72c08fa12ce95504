"""A pytest plugin for runs that may be cut off: each failure is told when it happens, and the run ends in time.

TORPOR_PART_S: seconds that the run has, if it is set; no test begins in the last tenth of it.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

STARTED = time.monotonic()
SLOW_S = 3.0


class AtOnce:
    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal
        self._session: pytest.Session | None = None
        self._limit_s = 0.9 * float(os.environ.get("TORPOR_PART_S") or "inf")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line("")
            for line in report.longreprtext.splitlines():
                self._terminal.write_line(line)
        if report.duration >= SLOW_S:
            self._terminal.write_line(f" {report.when} of {report.nodeid}: {report.duration:.0f} s")

    def pytest_runtest_logfinish(self) -> None:
        if self._session is not None and time.monotonic() - STARTED > self._limit_s:
            self._session.shouldfail = "no time is left for the tests that follow"


@pytest.hookimpl(trylast=True)  # after the terminal's reporter
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(AtOnce(config.pluginmanager.getplugin("terminalreporter")))
