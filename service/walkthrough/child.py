"""`torpor serve` as a child: started with a configuration of its own, watched, ended with all below it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
from rich.console import Console

from torpor.service.walkthrough.processes import Process, alive, descendants

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
_POLL_S = 0.2
_HEARTBEAT_S = 10.0
_SHOWN_LOG_LINES = 25


class StepFailed(Exception):
    """A step of the walk-through did not hold."""


class ChildService:
    def __init__(
        self, folder: Path, name: str, model: Path, tensor_parallel: int, device: str, console: Console
    ) -> None:
        self._console = console
        self._log = folder / "serve.log"
        self._config = folder / "torpor.yaml"
        self._shown = 0
        self._process: subprocess.Popen[bytes] | None = None
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        tree = {
            "models": [
                {
                    "name": name,
                    "engine": {"model": str(model), "dtype": "float32"},  # exact, however a prompt is split
                    "tensor_parallel": tensor_parallel,
                    "kv_cache": {"gpu_bytes": "512MiB", "host_bytes": "1GiB"},
                }
            ],
            "device": {"kind": device},
            "host_pool": {"bytes": "1GiB"},
            "http": {"port": port},
            "journal": {"path": str(folder / "journal.db")},
        }
        self._config.write_text(json.dumps(tree, indent=2))  # JSON is YAML

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when a model is loaded. Raises StepFailed with the end of the log."""
        command = [sys.executable, "-m", "torpor.service.cli", "serve", "--config", str(self._config)]
        self._console.print(f"Starting the service: {' '.join(command)}", highlight=False, soft_wrap=True)
        # Variables of a surrounding service must not change this one's configuration.
        environment = {name: value for name, value in os.environ.items() if not _configures(name)}
        with self._log.open("wb") as log:
            # A session of its own: an interrupt at the terminal reaches us, and we end the child in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        begun = told = time.monotonic()
        while not self._ready():
            self._show_progress()
            if time.monotonic() - told >= _HEARTBEAT_S:
                told = time.monotonic()
                self._console.print(f"   … {told - begun:.0f} s, still loading", highlight=False)
            code = self._process.poll()
            if code is not None:
                raise StepFailed(f"the service ended with {code} while starting:\n{self._tail()}")
            if time.monotonic() - begun > START_TIMEOUT_S:
                raise StepFailed(f"the service was not ready after {START_TIMEOUT_S:g} s:\n{self._tail()}")
            time.sleep(_POLL_S)
        self._show_progress()
        self._console.print(f"Ready after {time.monotonic() - begun:.1f} s", highlight=False)

    def stop(self) -> None:
        """SIGTERM, and every descendant gone. Raises StepFailed when one stays."""
        assert self._process is not None
        family = descendants(self.pid)
        self._console.print(f"\nStopping the service and its {len(family)} child processes")
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise StepFailed(f"the service did not end within {STOP_TIMEOUT_S:g} s of SIGTERM") from None
        left = _wait_until_gone(family)
        if left:
            raise StepFailed(f"child processes outlived the service: {left}")
        if code != 0:
            raise StepFailed(f"the service ended with {code}:\n{self._tail()}")

    def kill(self) -> None:
        """The last resort, for every way out but `stop`: nothing of ours may go on."""
        if self._process is None or self._process.poll() is not None:
            return
        family = descendants(self.pid)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in _wait_until_gone(family):
            if alive(process):
                os.kill(process.pid, signal.SIGKILL)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _show_progress(self) -> None:
        with self._log.open("r", errors="replace") as log:
            log.seek(self._shown)
            while (line := log.readline()).endswith("\n"):
                self._shown = log.tell()
                if line.startswith("torpor: "):
                    self._console.print(f"   {line.rstrip()}", markup=False, highlight=False, soft_wrap=True)

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_SHOWN_LOG_LINES:])


def _configures(variable: str) -> bool:
    return variable.startswith("TORPOR_") and "__" in variable


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_gone(family: list[Process], timeout_s: float = 15.0) -> list[Process]:
    deadline = time.monotonic() + timeout_s
    while (left := [one for one in family if alive(one)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left
