"""Starting, asking and stopping a real `torpor serve`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import httpx
import pytest

START_TIMEOUT_S = 180


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running front door: its address, its process and a client with long time-outs."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self.process = process
        self.log = log
        self.http = httpx.Client(base_url=url, timeout=120)

    def model(self) -> dict[str, object]:
        answer = self.http.get("/models")
        answer.raise_for_status()
        name = answer.json()["models"][0]["name"]
        return dict(self.http.get(f"/models/{name}").raise_for_status().json())

    def chat(self, question: str, **more: object) -> httpx.Response:
        body = {
            "model": self.model_name(),
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 24,
        }
        return self.http.post("/v1/chat/completions", json=body | more)

    def model_name(self) -> str:
        return str(self.http.get("/v1/models").raise_for_status().json()["data"][0]["id"])


def start_server(
    folder: Path,
    *arguments: str,
    states: Collection[str] = ("awake",),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Server:
    """Start `torpor serve` with state of its own under `folder`; wait until all models are in one of the states."""
    port = free_port()
    log = folder / "serve.log"
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state"), "TORPOR_HTTP__PORT": str(port)}
    environment |= {"TORPOR_JOURNAL__PATH": str(folder / "journal.db")} | variables
    command = [sys.executable, "-m", "torpor.service.cli", "serve", *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"serve ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            models = server.http.get("/models").json()["models"]
            if models and all(one["state"] in states for one in models):
                return server
        except (httpx.TransportError, KeyError, ValueError):
            pass
        time.sleep(0.3)
    stop_server(server)
    pytest.fail(f"not {' or '.join(states)} after {START_TIMEOUT_S} s:\n{log.read_text()[-4000:]}")


def stop_server(server: Server) -> int:
    """SIGTERM, and what it ended with; killed after 30 s."""
    server.http.close()
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(30)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
        raise
