"""Starts and ends service_child.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

HERE = Path(__file__).parent
START_TIMEOUT_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServiceProcess:
    def __init__(
        self,
        folder: Path,
        *flags: str,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port if port is not None else free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, str(HERE / "service_child.py"), str(folder), str(self.port), *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode}: {self.process.communicate()}")
            try:
                if httpx.get(f"{self.url}/readyz").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError("not ready")

    def end(self, number: int) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) after this signal."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@contextmanager
def running(
    folder: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[ServiceProcess]:
    service = ServiceProcess(folder, *flags, environment=environment)
    try:
        service.wait_ready()
        yield service
    finally:
        if service.process.poll() is None:
            service.process.kill()
            service.process.communicate()
